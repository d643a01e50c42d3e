"""The protocol: what a method is, what it sees of a fit, and the steps that methods share."""

from doxa.method.method import Method, as_method
from doxa.method.run import FitSettings, Number, Run
from doxa.method.stage import (
    Mark,
    Marks,
    Stage,
    Step,
    average_from,
    averaged,
    first_averaged,
    noise_on_held_out,
    optimise,
    refresh_batch_norm,
    statistics_of_draws,
)
from doxa.method.state import (
    Clock,
    Info,
    Known,
    Objective,
    State,
    folded,
    log_joint,
    network_part,
    of_subset,
    potential,
    slice_state,
    target,
    unfolded,
)
from doxa.model.model import Problem

__all__ = [
    "Clock", "FitSettings", "Info", "Known", "Mark", "Marks", "Method", "Number", "Objective",
    "Problem", "Run", "Stage", "State", "Step", "as_method", "average_from", "averaged",
    "first_averaged", "folded", "log_joint", "network_part", "noise_on_held_out", "of_subset",
    "optimise", "potential", "refresh_batch_norm", "slice_state", "statistics_of_draws",
    "target", "unfolded",
]  # fmt: skip
