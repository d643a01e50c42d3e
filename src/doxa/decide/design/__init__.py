"""What to measure next: expected information gain, the best design, studies that adapt."""

from doxa.decide.design.adaptive import train_policy
from doxa.decide.design.beliefs import Belief, Weighted
from doxa.decide.design.eig import eig
from doxa.decide.design.estimate import EIG
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.information import Information, information
from doxa.decide.design.labelling import labelling
from doxa.decide.design.models import location_finding, working_memory
from doxa.decide.design.optimise import Best, best_design
from doxa.decide.design.policy import Adaptive, Fixed, Policy, Random
from doxa.decide.design.rehearsal import Rehearsal, rehearse
from doxa.decide.design.space import Box, Choices, Reals, Sequence, Space
from doxa.decide.design.study import Study

__all__ = [
    "EIG", "Adaptive", "Belief", "Best", "Box", "Choices", "Experiment", "Fixed", "Information",
    "Policy", "Random", "Reals", "Rehearsal", "Sequence", "Space", "Study", "Weighted",
    "best_design", "eig", "information", "labelling", "location_finding", "rehearse",
    "train_policy", "working_memory",
]  # fmt: skip
