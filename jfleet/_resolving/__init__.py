"""From a strategy, a mesh and an optimizer to what runs: the table and its rules."""
