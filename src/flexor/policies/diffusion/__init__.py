"""Diffusion Policy: a U-Net over time turns noise into action chunks."""
