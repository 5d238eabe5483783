"""Vision-language models that policies are built on: PaliGemma, SmolVLM2."""
