"""VQ-BeT: a transformer predicts actions as codes of a learned vocabulary."""
