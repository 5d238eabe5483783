"""Estimate memory, time and cost of a run before it starts, without a GPU."""
