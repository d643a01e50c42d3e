"""The protocol of methods: `Method`, its interface to a fit (`Run`), and shared stages."""

from doxa.method.method import Method, as_method
from doxa.method.run import Callback, FitSettings, Number, Run
from doxa.method.stage import (
    Hook,
    Hooks,
    Stage,
    Step,
    average_from,
    first_averaged,
    noise_on_held_out,
    optimise,
    refresh_batch_norm,
    statistics_of_draws,
)
from doxa.method.state import (
    AnalyticGradient,
    Clock,
    ColumnClock,
    Info,
    Objective,
    State,
    TensorGradient,
    as_buffers,
    average_name,
    averaged,
    buffer_name,
    buffers_of,
    flatten_particles,
    gradients_by_tensor,
    log_joint,
    network_part,
    of_subset,
    potential,
    slice_state,
    target,
    unflatten_particles,
)
from doxa.method.trace import Forces, Gradient, Proposal, Record, Trajectory, Tree
from doxa.model.model import Problem

__all__ = [
    "AnalyticGradient",
    "Callback",
    "Clock",
    "ColumnClock",
    "FitSettings",
    "Forces",
    "Gradient",
    "Hook",
    "Hooks",
    "Info",
    "Method",
    "Number",
    "Objective",
    "Problem",
    "Proposal",
    "Record",
    "Run",
    "Stage",
    "State",
    "Step",
    "TensorGradient",
    "Trajectory",
    "Tree",
    "as_buffers",
    "as_method",
    "average_from",
    "average_name",
    "averaged",
    "buffer_name",
    "buffers_of",
    "first_averaged",
    "flatten_particles",
    "gradients_by_tensor",
    "log_joint",
    "network_part",
    "noise_on_held_out",
    "of_subset",
    "optimise",
    "potential",
    "refresh_batch_norm",
    "slice_state",
    "statistics_of_draws",
    "target",
    "unflatten_particles",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
