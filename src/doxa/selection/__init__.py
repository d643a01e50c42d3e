"""Selection of a network, a prior or settings: by evidence, by the ELBO, or by held-out rows."""

from doxa.selection.networks import evidence, tune
from doxa.selection.result import Candidate, Evidence
from doxa.selection.splits import Split

__all__ = ["Candidate", "Evidence", "Split", "evidence", "tune"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
