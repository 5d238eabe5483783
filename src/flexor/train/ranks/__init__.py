"""The processes of a run: which this one is, what they share, how they stop, and what if one hangs."""
