"""pi0-FAST: a vision-language model that predicts actions as tokens."""
