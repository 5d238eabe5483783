"""`flexor data split`, `merge`, `delete`, `tasks` and `trim`: episodes are copied into new datasets, unchanged."""
