"""Jobs on Hugging Face Jobs."""
