"""Inference over functions rather than weights."""
