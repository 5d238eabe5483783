"""What a dataset needs from the host: memory, cores and disk."""

FRAMES, FPS = 45_000, 30.0  # defaults for a dataset that is not recorded yet
