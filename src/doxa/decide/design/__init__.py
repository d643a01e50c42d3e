"""What to measure next: expected information gain, the best design, studies that adapt."""

from doxa.decide.design.adaptive import Information, information, train_policy
from doxa.decide.design.beliefs import Belief, Weighted
from doxa.decide.design.eig import eig
from doxa.decide.design.estimate import EIG
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.models import location_finding, working_memory
from doxa.decide.design.policy import Adaptive, Fixed, Policy, Random
from doxa.decide.design.space import Box, Choices, Reals, Sequence, Space

__all__ = [
    "EIG", "Adaptive", "Belief", "Box", "Choices", "Experiment", "Fixed", "Information", "Policy",
    "Random", "Reals", "Sequence", "Space", "Weighted", "eig", "information", "location_finding",
    "train_policy", "working_memory",
]  # fmt: skip
