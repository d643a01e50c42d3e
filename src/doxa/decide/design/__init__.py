"""What to measure next: expected information gain, the best design, studies that adapt."""

from typing import Any

from doxa.decide.design.adaptive import (
    Adaptive,
    Fixed,
    Information,
    Policy,
    Random,
    information,
    train_policy,
)
from doxa.decide.design.distributions import ParameterDistribution, Weighted
from doxa.decide.design.draws import EIG
from doxa.decide.design.eig import eig
from doxa.decide.design.experiment import (
    Box,
    Choices,
    Experiment,
    Reals,
    Sequence,
    Space,
    location_finding,
    working_memory,
)
from doxa.decide.design.optimise import Best, best_design
from doxa.decide.design.study import Rehearsal, Study, labelling, rehearse
from doxa.errors import deprecated

__all__ = [
    "EIG", "Adaptive", "Best", "Box", "Choices", "Experiment", "Fixed", "Information",
    "ParameterDistribution", "Policy", "Random", "Reals", "Rehearsal", "Sequence", "Space", "Study",
    "Weighted", "best_design", "eig", "information", "labelling", "location_finding", "rehearse",
    "train_policy", "working_memory",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "Belief":
        deprecated("doxa.decide.design.Belief", "doxa.decide.design.ParameterDistribution")
        return ParameterDistribution
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
