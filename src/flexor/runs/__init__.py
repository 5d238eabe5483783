"""Runs seen from outside: their folders are read, nothing is written into them, and nothing of torch is imported."""
