"""Jobs on Hugging Face's machines."""
