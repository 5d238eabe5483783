"""What a run measures of itself, its GPUs and its host, and the services that get it."""
