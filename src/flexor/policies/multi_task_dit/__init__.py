"""Multi-Task DiT: action chunks from noise, by a transformer that reads the task."""
