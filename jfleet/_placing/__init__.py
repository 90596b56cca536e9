"""Which spec a leaf gets: rules by path, padding, the policy of a level."""
