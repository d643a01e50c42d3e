"""Expected information gain where outcomes are discrete and few: the sum over y is done exactly.

    EIG = Σ_s w_s Σ_y p(y | θ_s, d) log [p(y | θ_s, d) / p̄(y | d)],   p̄ = Σ_s w_s p(y | θ_s, d)

With θ_s drawn from the prior this is the Rao–Blackwellised estimate (Vincent & Rainforth, 2017):
low by O(1/S), since p̄'s entropy is. With all atoms of a discrete θ it is exact, and with a
quadrature's nodes up to an error that is stated: nodes are added until p̄ and the mean of
Σ_y p log p are resolved. Its gradient by the design needs no draw of y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.decide.design.beliefs import Quadrature, Weighted
from doxa.decide.design.draws import MOST_OUTCOMES, source
from doxa.decide.design.estimate import EIG, EXACT, LOWER
from doxa.decide.design.experiment import Experiment
from doxa.errors import MethodError

_ZERO = -1e30  # the logarithm of a probability that is 0, as a finite number
_TABLE = 1 << 24  # log probabilities held at a time
_TOGETHER = 16  # designs that share the nodes of a quadrature


def divergences(log_p: Tensor, log_weight: Tensor) -> Tensor:
    """KL from p(y | θ_s, d) to their mixture, [S, D], of a table [Y, S, D]."""
    possible = log_p > -torch.inf  # 0 log 0 = 0, and its gradient too: −∞ never enters a product
    log_p = torch.where(possible, log_p, log_p.new_tensor(_ZERO))
    marginal = (log_p + log_weight.unsqueeze(-1)).logsumexp(1, keepdim=True)  # [Y, 1, D]
    return torch.where(possible, log_p.exp() * (log_p - marginal), 0.0).sum(0)


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
    outcomes = _outcomes(experiment, atoms.theta, designs)
    each = _TABLE // (len(outcomes) * len(atoms.theta))
    if isinstance(atoms, Quadrature):
        each = min(each, _TOGETHER)
    parts = [_summed(experiment, atoms, outcomes, few) for few in designs.split(max(1, each))]
    values, errors, used = zip(*parts, strict=True)
    note = "sums over θ and y"
    if isinstance(atoms, Quadrature):
        note = "sums over y, a quadrature over θ; errors are of its coarser rule"
    return EIG(
        designs, torch.cat(values), torch.cat(errors), EXACT, "exact", note, {"nodes": max(used)}
    )  # fmt: skip


def _summed(
    experiment: Experiment, atoms: Weighted, outcomes: Tensor, designs: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Values and errors [D], and how many atoms were used."""
    if isinstance(atoms, Quadrature):

        @torch.no_grad()
        def integrands(theta: Tensor) -> Tensor:
            """p(y | θ, d) and Σ_y p log p: [Y + 1, D, S]."""
            p = experiment.table(outcomes, theta, designs).exp()
            return torch.cat([p, torch.special.entr(p).sum(0, keepdim=True)]).transpose(1, 2)

        atoms = atoms.refined(integrands)
    log_p = experiment.table(outcomes, atoms.theta, designs)
    gain = divergences(log_p, atoms.log_weight)  # [S, D]
    values = (atoms.weight.unsqueeze(-1) * gain).sum(0)
    errors = torch.zeros_like(values).detach()
    if isinstance(atoms, Quadrature):  # by a weight, EIG changes as the divergence does
        errors = atoms.error((gain - values).detach())
    return values, errors, len(atoms.theta)
