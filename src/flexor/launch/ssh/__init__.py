"""Runs on a machine that is reached by ssh."""
