"""Diffusion Policy: action chunks from noise, by a U-Net over time."""
