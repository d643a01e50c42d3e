"""The active learning loop: fit, score the pool, choose rows, label them, repeat."""

from doxa.decide.active.labels import LabelState, Learned, Learner
from doxa.decide.active.learn import Stopping, answer, learn

__all__ = ["LabelState", "Learned", "Learner", "Stopping", "answer", "learn"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
