"""`flexor data check` and `flexor data info`: read a dataset that may be broken."""
