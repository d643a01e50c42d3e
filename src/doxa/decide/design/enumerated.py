"""Expected information gain where outcomes are discrete and few: the sum over y is done exactly.

    EIG = Σ_s w_s Σ_y p(y | θ_s, d) log [p(y | θ_s, d) / p̄(y | d)],   p̄ = Σ_s w_s p(y | θ_s, d)

With θ_s drawn from the prior this is the Rao–Blackwellised estimate (Vincent & Rainforth, 2017):
low by O(1/S), since p̄'s entropy is. With a quadrature's nodes and weights, or all atoms of a
discrete θ, it is exact. Its gradient by the design needs no draw of y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.decide.design.draws import MOST_OUTCOMES, source
from doxa.decide.design.estimate import EIG, EXACT, LOWER
from doxa.decide.design.experiment import Experiment
from doxa.errors import MethodError


def divergences(log_p: Tensor, log_weight: Tensor) -> Tensor:
    """KL from p(y | θ_s, d) to their mixture, [S, D], of a table [Y, S, D]."""
    marginal = (log_p + log_weight.unsqueeze(-1)).logsumexp(1, keepdim=True)  # [Y, 1, D]
    each = log_p.exp() * (log_p - marginal)
    return torch.where(log_p == -torch.inf, torch.zeros_like(each), each).sum(0)


def _outcomes(experiment: Experiment, theta: Tensor, designs: Tensor) -> Tensor:
    found = experiment.outcomes(theta, designs)
    if found is None:
        raise MethodError(
            "outcomes are not discrete, or more than "
            f"{MOST_OUTCOMES}: estimate by 'nmc' and 'pce', which draw them"
        )
    return found


def rao_blackwellised(experiment: Experiment, designs: Tensor, outer: int, seed: int) -> EIG:
    theta = experiment.prior.draw(outer, source(designs.device, "enumerated", seed), designs)
    log_p = experiment.table(_outcomes(experiment, theta, designs), theta, designs)
    equal = theta.new_zeros(outer) - theta.new_tensor(float(outer)).log()
    terms = divergences(log_p, equal)  # [N, D], also the influence of each draw
    errors = terms.detach().std(0) / outer**0.5
    return EIG(
        designs, terms.mean(0), errors, LOWER, "enumerated", "low by O(1/outer)", {"outer": outer}
    )


def exact(experiment: Experiment, designs: Tensor, nodes: int) -> EIG:
    atoms = experiment.prior.atoms(designs, nodes)
    log_p = experiment.table(_outcomes(experiment, atoms.theta, designs), atoms.theta, designs)
    values = (atoms.weight.unsqueeze(-1) * divergences(log_p, atoms.log_weight)).sum(0)
    return EIG(
        designs, values, torch.zeros_like(values), EXACT, "exact", "sums over θ and y",
        {"nodes": len(atoms.theta)},
    )  # fmt: skip
