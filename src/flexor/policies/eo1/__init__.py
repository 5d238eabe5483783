"""EO-1: a vision-language model reads images, the task and the state, and denoises actions in the same sequence."""
