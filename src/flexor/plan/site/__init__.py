"""Hardware for a run: GPUs, clouds and prices."""
