"""X-VLA: Florence-2, and a transformer that denoises actions, with learned prompts for each kind of robot."""
