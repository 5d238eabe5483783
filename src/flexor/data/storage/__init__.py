"""Reads files on disk, on the Hub or in a bucket."""
