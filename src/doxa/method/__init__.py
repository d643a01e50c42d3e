"""The protocol: what a method is, what it sees of a fit, and the steps that methods share."""

from doxa.method.clock import (
    Clock,
    Info,
    State,
    folded,
    network_part,
    slice_state,
    unfolded,
)
from doxa.method.members import FitSettings, Number
from doxa.method.method import Method, as_method
from doxa.method.objectives import Known, Objective, log_joint, of_subset, potential, target
from doxa.method.run import Run
from doxa.method.stage import Mark, Marks, Stage, Step
from doxa.method.steps import (
    average_from,
    averaged,
    first_averaged,
    noise_on_held_out,
    optimise,
    refresh_batch_norm,
    statistics_of_draws,
)
from doxa.model.problem import Problem

__all__ = [
    "Clock", "FitSettings", "Info", "Known", "Mark", "Marks", "Method", "Number", "Objective",
    "Problem", "Run", "Stage", "State", "Step", "as_method", "average_from", "averaged",
    "first_averaged", "folded", "log_joint", "network_part", "noise_on_held_out", "of_subset",
    "optimise", "potential", "refresh_batch_norm", "slice_state", "statistics_of_draws",
    "target", "unfolded",
]  # fmt: skip
