"""`eig`: how much an experiment is expected to tell about θ.

EIG(d) = E_{p(θ) p(y | θ, d)} log [p(y | θ, d) / p(y | d)] = I(θ; y | d)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.contrastive import nested, prior_contrastive
from doxa.decide.design.enumerated import exact, rao_blackwellised
from doxa.decide.design.estimate import EIG
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.variational import barber_agakov, info_nce, marginal, variational_nested
from doxa.errors import MethodError, NumericalError, did_you_mean

_TOGETHER = 512  # designs that are estimated at a time: memory grows with them
# What each takes beside the experiment, the designs and a seed: the default number of draws.
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
    experiment: what is believed and what would be seen.
    designs: [D, *shape]; default: all choices of the experiment's space. Where it is a tensor that
        requires a gradient, `values` has one: through y where that is reparametrisable, else by
        the score function ("exact" and "enumerated" need neither).
    estimator: "exact" (θ of one number or discrete, y discrete), "enumerated" (y discrete), "nmc"
        or its other name "snmc" (upper bound), "pce" (lower bound), "ba" (lower bound by a learned
        posterior), "vnmc" (upper bound by a learned proposal), "marginal" (upper bound by a
        learned p(y | d)), "infonce" (lower bound by a learned critic, for simulators).
    outer: draws of (θ, y). inner: contrasts of each. steps: of what is learned. nodes: with which
        the quadrature begins; more are placed where they are needed. Each where the estimator takes
        it.
    seed: the same seed, the same value.

    Returns
    -------
    `EIG` with `values`, `errors`, `kind` and `note`.
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
