"""Gaussian priors whose scale was learned, as a posterior keeps them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from doxa.method.run import Run
from doxa.priors import Normal, Prior


def scaled_priors(run: Run, wider: Mapping[str, Tensor]) -> list[Prior | dict[str, Prior]]:
    """Each member's Gaussian prior with its standard deviation times a factor [M] for some weights,
    by name; the others are under the prior as it was."""
    entries = [e for e in run.layout.entries if not e.name.startswith("likelihood.")]
    std = run.prior.curvature(run.initial).double().rsqrt()  # [M, P], the same within an entry
    found: list[Prior | dict[str, Prior]] = []
    for m in range(run.size):
        own: dict[str, Prior] = {}
        for e in entries:
            factor = float(wider[e.name][m]) if e.name in wider else 1.0
            own[e.name] = Normal(factor * float(std[m, run.layout.slices[e.name].start]))
        alike = len(set(own.values())) == 1
        found.append(own[entries[0].name] if alike else own)
    return found
