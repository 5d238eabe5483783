"""GR00T N1.7: a frozen Qwen3-VL reads images and the task, and a transformer that attends to it denoises actions."""
