"""Bytes of files: on disk, on the Hub, in a bucket."""
