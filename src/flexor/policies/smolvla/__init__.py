"""SmolVLA: a small vision-language model, and an expert beside it that turns noise into action chunks."""
