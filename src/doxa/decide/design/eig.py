"""`eig`: the expected information gain of an experiment about θ.

    EIG(d) = E_{p(θ) p(y | θ, d)} log [p(y | θ, d) / p(y | d)] = I(θ; y | d)

If outcomes are discrete and few, the sum over y is exact:

    EIG = Σ_s w_s Σ_y p(y | θ_s, d) log [p(y | θ_s, d) / p̄(y | d)],   p̄ = Σ_s w_s p(y | θ_s, d)

With θ_s drawn from the prior, this is the Rao–Blackwellised estimate (Vincent & Rainforth, 2017).
It is too small by O(1/S), because the entropy of p̄ is too small. With all atoms of a discrete θ,
it is exact. With the nodes of a quadrature, it is exact up to a stated error: nodes are added until
p̄ and the mean of Σ_y p log p are resolved. Its gradient by the design needs no draw of y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.distributions import Quadrature, Weighted
from doxa.decide.design.draws import EIG, EXACT, LOWER, MOST_OUTCOMES, source
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.variational import (
    barber_agakov,
    info_nce,
    marginal,
    nested,
    prior_contrastive,
    variational_nested,
)
from doxa.errors import MethodError, NumericalError, did_you_mean

_ZERO = -1e30  # the logarithm of a probability that is 0, as a finite number
_TABLE = 1 << 24  # log probabilities held at a time
_SHARED_NODES = 16  # designs that share the nodes of a quadrature


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
        each = min(each, _SHARED_NODES)
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


_TOGETHER = 512  # designs that are estimated at a time: memory grows with them
# Arguments of each besides the experiment, the designs and a seed: default numbers of draws.
_TAKES: dict[str, dict[str, int]] = {
    "exact": {"nodes": 200},
    "enumerated": {"outer": 10_000},
    "nmc": {"outer": 10_000, "inner": 500},
    "snmc": {"outer": 10_000, "inner": 500},
    "pce": {"outer": 10_000, "inner": 500},
    "ba": {"outer": 10_000, "steps": 300},
    "vnmc": {"outer": 10_000, "inner": 50, "steps": 300},
    "marginal": {"outer": 10_000, "steps": 300},
    "infonce": {"outer": 10_000, "inner": 255, "steps": 300},
}
_ALIASES = {"upper": "snmc", "lower": "pce", "posterior": "ba"}
_CALLED: dict[str, Callable[..., EIG]] = {
    "exact": lambda e, d, seed, **kw: exact(e, d, **kw),
    "enumerated": rao_blackwellised,
    "nmc": nested,
    "snmc": partial(nested, name="snmc"),
    "pce": prior_contrastive,
    "ba": barber_agakov,
    "vnmc": variational_nested,
    "marginal": marginal,
    "infonce": info_nce,
}


def eig(
    experiment: Experiment,
    designs: Any = None,
    estimator: str = "pce",
    *,
    outer: int | None = None,
    inner: int | None = None,
    steps: int | None = None,
    nodes: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> EIG:
    """Expected information gain of designs, in nats.

    Parameters
    ----------
    experiment : Experiment
        The prior of θ, the likelihood of outcomes and the space of designs.
    designs : array_like [D, *shape], optional
        The default is all choices of the space. If it is a tensor that requires a gradient,
        `values` has one: through y if y is reparametrisable, else by the score function ("exact"
        and "enumerated" need neither).
    estimator : str, default "pce"
        "exact" (θ of one number or discrete, y discrete), "enumerated" (y discrete), "nmc" or its
        alias "snmc" (upper bound), "pce" (lower bound), "ba" (lower bound by a learned posterior),
        "vnmc" (upper bound by a learned proposal), "marginal" (upper bound by a learned p(y | d)),
        "infonce" (lower bound by a learned critic, for simulators).
    outer : int, optional
        Number of draws of (θ, y), for estimators that use it; likewise the next three.
    inner : int, optional
        Number of contrasts per draw.
    steps : int, optional
        Training steps of a learned bound.
    nodes : int, optional
        Initial number of quadrature nodes; more are placed where they are needed.
    seed : int, default 0
        Seed of the draws; the same seed gives the same value.
    device : device, optional
        Where to compute. The default is the device of the designs.
    dtype : dtype, optional
        Floating-point type. The default is that of the designs.

    Returns
    -------
    EIG
        With `values`, `errors`, `kind` and `note`.
    """
    name = _ALIASES.get(estimator, estimator) if isinstance(estimator, str) else estimator
    if name not in _TAKES:
        raise MethodError(
            f"no estimator is called {estimator!r}{did_you_mean(str(estimator), _TAKES)}"
        )
    if not isinstance(experiment, Experiment):
        raise MethodError(f"experiment must be an Experiment, not {type(experiment).__name__}")
    given = {"outer": outer, "inner": inner, "steps": steps, "nodes": nodes}
    for key, value in given.items():
        if value is not None and key not in _TAKES[name]:
            raise MethodError(f"{name} takes no {key}, but {', '.join(_TAKES[name])}")
    counts = {
        key: default if given[key] is None else checks.whole(key, given[key])
        for key, default in _TAKES[name].items()
    }
    found = experiment.designs(designs)
    found = found.to(
        device=found.device if device is None else checks.place(device),
        dtype=found.dtype if dtype is None else checks.floating(dtype),
    )
    draws = {"seed": checks.seed("seed", seed), **counts}
    parts = [_CALLED[name](experiment, few, **draws) for few in found.split(_TOGETHER)]
    result = parts[0] if len(parts) == 1 else _joined(parts, found)
    _check(result.values, found)
    return result


def _joined(parts: list[EIG], designs: Tensor) -> EIG:
    bias = [part.bias for part in parts if part.bias is not None]
    return replace(
        parts[0], designs=designs, values=torch.cat([part.values for part in parts]),
        errors=torch.cat([part.errors for part in parts]), bias=torch.cat(bias) if bias else None,
    )  # fmt: skip


def _check(values: Tensor, designs: Tensor) -> None:
    bad = (~torch.isfinite(values.detach())).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise NumericalError(
            f"the gain of design {designs[row].tolist()} is {float(values[row])}: its likelihood "
            "is not finite for some θ of the prior"
        )
