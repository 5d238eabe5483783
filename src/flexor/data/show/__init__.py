"""`flexor data show`: a dataset as one HTML page, or as images in the terminal."""
