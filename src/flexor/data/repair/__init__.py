"""`flexor data repair`: repairs what it can without guessing, into a new dataset."""
