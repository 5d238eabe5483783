"""Frames by id: from a cache, or decoded."""
