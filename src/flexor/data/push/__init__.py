"""Pushes a dataset to the Hugging Face Hub, in LeRobot's layout."""
