"""Decisions: what to label next (active learning), and what to measure next (design)."""
