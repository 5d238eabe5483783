"""The processing before and after a policy. All steps are imported here, so that a checkpoint can name any of them."""

from flexor.policies.processing import normalize, prompt, relative_actions, rename_and_move, tokenize

__all__ = ["normalize", "prompt", "relative_actions", "rename_and_move", "tokenize"]
