"""pi0 and pi0.5: PaliGemma reads images and the task, and an action expert denoises actions."""
