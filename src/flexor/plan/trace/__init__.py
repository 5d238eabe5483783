"""One training step without data and memory, written down as it happens."""
