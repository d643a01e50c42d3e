"""Which network, which prior, which settings? By evidence, a bound on it, or held-out rows."""

from doxa.app.selection.networks import evidence, tune
from doxa.app.selection.result import Candidate, Evidence

__all__ = ["Candidate", "Evidence", "evidence", "tune"]
