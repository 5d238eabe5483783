"""The run's folder: its checkpoints, their contents, and how a run resumes from them."""
