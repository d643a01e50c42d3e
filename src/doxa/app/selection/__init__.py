"""Selection of a network, a prior or settings: by evidence, by the ELBO, or by held-out rows."""

from doxa.app.selection.networks import evidence, tune
from doxa.app.selection.result import Candidate, Evidence

__all__ = ["Candidate", "Evidence", "evidence", "tune"]
