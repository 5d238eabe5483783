"""WALL-X: a vision-language model with an expert for actions in every layer, which denoises or writes them."""
