"""Where a run may take place: GPUs, clouds, prices."""
