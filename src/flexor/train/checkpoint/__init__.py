"""The run's folder: checkpoints, what they hold, how a run resumes from them."""
