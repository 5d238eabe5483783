"""Packets of a video -> frames."""
