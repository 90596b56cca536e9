"""Settings of a strategy: their types, checks and names. No jax here."""
