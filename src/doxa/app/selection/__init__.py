"""Which network, and which prior? By evidence, by a bound on it, and by held-out rows."""

from doxa.app.selection.networks import evidence
from doxa.app.selection.result import Candidate, Evidence

__all__ = ["Candidate", "Evidence", "evidence"]
