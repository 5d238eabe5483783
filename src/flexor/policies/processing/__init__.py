"""The processing around a policy. All of its steps are imported here, so that a checkpoint may name any of them."""

from flexor.policies.processing import normalize, rename_and_move, tokenize

__all__ = ["normalize", "rename_and_move", "tokenize"]
