"""Episodes in an environment, and how they went."""
