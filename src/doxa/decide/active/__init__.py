"""The active learning loop: fit, score the pool, ask, label, repeat."""

from doxa.decide.active.book import Book
from doxa.decide.active.learn import answer, learn
from doxa.decide.active.learned import Learned, Learner
from doxa.decide.active.stopping import Stopping

__all__ = ["Book", "Learned", "Learner", "Stopping", "answer", "learn"]
