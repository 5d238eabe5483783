"""Runs episodes in an environment and reports the results."""
