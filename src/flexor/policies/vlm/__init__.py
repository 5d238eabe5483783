"""Vision-language models that policies are built on: PaliGemma, SmolVLM2, Qwen2.5-VL, Florence-2."""
