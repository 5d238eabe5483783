"""Record one training step, run without data and without memory."""
