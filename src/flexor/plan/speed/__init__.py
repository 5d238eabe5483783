"""Traces -> seconds, and the measurements behind that."""
