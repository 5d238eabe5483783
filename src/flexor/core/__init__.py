"""Helpers that every other folder may import. This folder imports none of them."""
