"""pi0-FAST: a vision-language model that writes actions as tokens."""
