"""Runs on the Hugging Face Hub: pushed while they train, described by a model card, resumed elsewhere."""
