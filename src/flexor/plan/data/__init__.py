"""What a dataset takes of the host: memory, cores, disk."""

FRAMES, FPS = 45_000, 30.0  # of a dataset that nobody has recorded yet
