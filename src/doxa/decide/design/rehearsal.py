"""A study rehearsed on many simulated subjects at once: adaptive, fixed or random designs.

Beliefs of all subjects are weights [P, S] on common atoms, and a step is a few matrix products.
Where the atoms are a quadrature's nodes and too few for the posterior of some subject, it is
rehearsed again, with the same random numbers and more nodes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.beliefs import Quadrature, Weighted
from doxa.decide.design.draws import source, uniform
from doxa.decide.design.experiment import Experiment
from doxa.errors import DataError, MethodError

WAYS = ("adaptive", "random")


@dataclass(frozen=True)
class Rehearsal:
    """designs [T, P] (rows of the candidates), outcomes [T, P] (rows of the possible ones), and
    after each of 0..T experiments the posterior: mean and std [T + 1, P, ...], entropy [T + 1, P]
    of its density where θ is a number on a quadrature, of the atoms' weights elsewhere."""

    truth: Tensor
    designs: Tensor
    outcomes: Tensor
    mean: Tensor
    std: Tensor
    entropy: Tensor

    @property
    def error(self) -> Tensor:
        """Root mean square distance of the posterior mean from the truth, [T + 1]."""
        return (self.mean - self.truth).square().flatten(1).mean(1).sqrt()

    @property
    def gain(self) -> Tensor:
        """Information about θ so far, averaged over subjects, in nats [T + 1]."""
        return (self.entropy[:1] - self.entropy).mean(1)


def rehearse(
    experiment: Experiment, truth: Tensor, steps: int, way: Any = "adaptive", *, seed: int = 0
) -> Rehearsal:
    """Run a study on subjects with known θ.

    Parameters
    ----------
    truth: θ of each subject [P, ...]. steps: experiments with each.
    way: "adaptive", "random", or fixed designs [steps, ...] for everyone.
    """
    checks.whole("steps", steps)
    designs = experiment.designs()
    truth = truth.to(designs)
    atoms: Weighted = experiment.prior.atoms(designs)
    table = experiment.outcomes(atoms.theta, designs)
    if table is None:
        raise MethodError("a rehearsal needs discrete outcomes; run a Study for each subject")
    chosen = None if isinstance(way, str) else _rows(experiment, way, designs, steps)
    if chosen is None and way not in WAYS:
        raise MethodError(f"way must be one of {', '.join(WAYS)} or a list of designs, not {way!r}")
    true_p = experiment.table(table, truth, designs).exp()  # [Y, P, D]
    while True:
        generator = source(designs.device, "rehearsal", seed)
        log_p = experiment.table(table, atoms.theta, designs)  # [Y, S, D]
        found, last = _run(atoms, log_p, true_p, truth, steps, way if chosen is None else chosen,
                           generator)  # fmt: skip
        finer = atoms.finer(last) if isinstance(atoms, Quadrature) else None
        if finer is None:
            return found
        atoms = finer


def _run(
    atoms: Weighted, log_p: Tensor, true_p: Tensor, truth: Tensor, steps: int, way: str | Tensor,
    generator: torch.Generator,
) -> tuple[Rehearsal, Tensor]:  # fmt: skip
    """A rehearsal on atoms, and the log weights [P, S] at its end."""
    p = log_p.exp()
    known = -torch.special.entr(p).sum(0)  # −H(y | θ_s, d) [S, D]
    people = torch.arange(len(truth), device=truth.device)
    theta = atoms.theta.reshape(len(atoms.theta), -1)
    log_w = atoms.log_weight.expand(len(truth), -1)
    log_cell = torch.zeros_like(atoms.log_weight)  # log w/p(θ), the width that a node stands for
    if isinstance(atoms, Quadrature):
        log_cell = atoms.log_weight - atoms.log_prob(atoms.theta)
    beliefs, kept = [_moments(log_w, theta, log_cell)], list[tuple[Tensor, Tensor]]()
    for t in range(steps):
        if isinstance(way, Tensor):
            row = way[t].expand(len(truth))
        elif way == "random":
            row = (uniform((len(truth),), truth, generator) * p.shape[2]).long()
        else:
            w = log_w.exp()
            marginal = torch.einsum("ps,ysd->ypd", w, p)
            row = (torch.special.entr(marginal).sum(0) + w @ known).argmax(1)
        seen = true_p[:, people, row].cumsum(0)  # [Y, P]
        y = (uniform((len(truth),), truth, generator) > seen[:-1]).sum(0)
        log_w = (log_w + log_p[y, :, row]).log_softmax(1)
        kept.append((row, y))
        beliefs.append(_moments(log_w, theta, log_cell))
    mean, std, entropy = (torch.stack(part) for part in zip(*beliefs, strict=True))
    rows, outcomes = (torch.stack(part) for part in zip(*kept, strict=True))
    shape = (steps + 1, *truth.shape)
    return Rehearsal(truth, rows, outcomes, mean.reshape(shape), std.reshape(shape), entropy), log_w


def _moments(log_w: Tensor, theta: Tensor, log_cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and std [P, ...] and entropy [P] of weights [P, S] on atoms [S, ...]."""
    weight = log_w.exp()
    centre = theta.mean(0)  # differences lose no digits to a mean that is far from zero
    mean = weight @ (theta - centre)
    std = (weight @ (theta - centre).square() - mean.square()).clamp_min(0).sqrt()
    return mean + centre, std, torch.special.entr(weight).sum(1) + weight @ log_cell


def _rows(experiment: Experiment, given: Any, designs: Tensor, steps: int) -> Tensor:
    """Which of the candidates fixed designs are."""
    fixed = experiment.designs(given, like=designs)
    if len(fixed) != steps:
        raise DataError(f"{len(fixed)} fixed designs were given for {steps} experiments")
    away = (fixed.reshape(steps, 1, -1) - designs.reshape(1, len(designs), -1)).abs().sum(2)
    return away.argmin(1)
