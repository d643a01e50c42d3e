"""What to measure next: expected information gain, the best design, studies that adapt."""

from doxa.decide.design.adaptive import (
    Adaptive,
    Fixed,
    Information,
    Policy,
    Random,
    information,
    train_policy,
)
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
from doxa.decide.design.posteriors import Belief, Weighted
from doxa.decide.design.study import Rehearsal, Study, labelling, rehearse

__all__ = [
    "EIG", "Adaptive", "Belief", "Best", "Box", "Choices", "Experiment", "Fixed", "Information",
    "Policy", "Random", "Reals", "Rehearsal", "Sequence", "Space", "Study", "Weighted",
    "best_design", "eig", "information", "labelling", "location_finding", "rehearse",
    "train_policy", "working_memory",
]  # fmt: skip
