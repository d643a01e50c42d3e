"""The active learning loop: fit, score the pool, ask, label, repeat."""
