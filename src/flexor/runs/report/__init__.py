"""`flexor report`: runs as one HTML page."""
