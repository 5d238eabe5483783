"""Multi-Task DiT: a transformer conditioned on the task turns noise into action chunks."""
