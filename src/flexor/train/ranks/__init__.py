"""The processes of a run: which one this is, how they split a batch, and what happens if one hangs."""
