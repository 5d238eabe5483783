"""Frames by number: decoded, or from where they are kept."""
