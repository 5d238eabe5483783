"""VQ-BeT: actions as words of a learned vocabulary, predicted by a transformer."""
