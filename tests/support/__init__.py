"""What tests share. `tests` is on the path of pytest and of every process that a test starts (environment.py)."""
