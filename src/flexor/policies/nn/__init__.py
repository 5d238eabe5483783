"""Network components that several policies share."""
