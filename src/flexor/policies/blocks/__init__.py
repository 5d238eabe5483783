"""Parts that several policies are built from."""
