"""`flexor data repair`: what can be mended without guessing, in a new dataset."""
