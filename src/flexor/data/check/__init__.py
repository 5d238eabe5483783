"""`flexor data check` and `flexor data info`: a dataset read without trusting it."""
