"""Decisions: what to label next (active learning), and what to measure next (design)."""

from doxa.decide import design
from doxa.decide.design import eig

__all__ = ["design", "eig"]
