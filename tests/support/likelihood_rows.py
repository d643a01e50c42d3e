"""One case for each row of the table of likelihoods, for tests that are about all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.likelihoods import LIKELIHOODS, Likelihood


def outputs_of(name: str, targets: int = 2) -> tuple[int, ...]:
    """The outputs of a network for so many targets; for classes, 4 of them."""
    kind = LIKELIHOODS[name]
    return (4,) if kind.class_axis else kind().outputs(torch.zeros(1, targets))


def theta_of(name: str, output: tuple[int, ...]) -> dict[str, Tensor]:
    """Learned parameters of one member, none of them at its initial value."""
    learned = LIKELIHOODS[name]().parameters(output)
    own = torch.tensor([-0.2, 0.3]).double()
    return {k: v.double() + own[i % 2] for i, (k, v) in enumerate(learned.items())}


def cases(targets: int = 2) -> dict[str, tuple[Likelihood, tuple[int, ...]]]:
    return {name: (kind(), outputs_of(name, targets)) for name, kind in LIKELIHOODS.items()}


def draws_of(name: str, f: Tensor, seed: int = 0) -> Tensor:
    """Targets that are drawn at the outputs f [N, *output]."""
    theta = theta_of(name, tuple(f.shape[1:]))
    return LIKELIHOODS[name]().sample(f, theta, torch.Generator().manual_seed(seed))
