"""Diagnostics of a fitted posterior: one call runs all checks and reports faults and remedies."""

from doxa.diagnose.doctor import diagnose, doctor
from doxa.diagnose.finding import Diagnosis, Finding
from doxa.posterior.chains import ebfmi, ess_bulk, ess_tail, rhat

__all__ = ["Diagnosis", "Finding", "diagnose", "doctor", "ebfmi", "ess_bulk", "ess_tail", "rhat"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
