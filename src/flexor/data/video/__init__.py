"""Reads and decodes video files."""
