"""`flexor watch`: runs on a live screen in the terminal."""
