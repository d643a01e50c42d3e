"""What to measure next: expected information gain, the best design, studies that adapt."""

from doxa.decide.design.beliefs import Belief, Weighted
from doxa.decide.design.eig import eig
from doxa.decide.design.estimate import EIG
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.space import Box, Choices, Sequence, Space

__all__ = ["EIG", "Belief", "Box", "Choices", "Experiment", "Sequence", "Space", "Weighted", "eig"]
