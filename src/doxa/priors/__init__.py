"""Priors over weights, elementwise on the flat parameter vector.

A prior is a frozen dataclass of settings. `bind(prior, layout)` turns it into tensors with one
value per element, so that one expression covers all tensors of all members:

    log p(w) = sum_j log p_j(w_j - m_j)

with m_j the centre of the entry: 1 for normalisation scales, else 0. The elements of a tensor
depend on each other where they share an unknown scale (`hierarchical.py`). Likelihood parameters
(entries "likelihood.*", log scales) always have the prior N(0, 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from doxa.errors import ModelError
from doxa.linalg.layout import Entry, Layout
from doxa.priors.bound import BoundPrior, Part, stack_bound
from doxa.priors.families import Family, GaussianFamily
from doxa.priors.priors import (
    FanInNormal,
    FlowPrior,
    Hierarchical,
    LaplacePrior,
    Normal,
    Prior,
    ScaleMixture,
    StudentTPrior,
)

__all__ = [
    "PRIORS",
    "BoundPrior",
    "FanInNormal",
    "FlowPrior",
    "Hierarchical",
    "LaplacePrior",
    "Normal",
    "Prior",
    "ScaleMixture",
    "StudentTPrior",
    "bind",
    "each_prior",
    "prior",
    "stack_bound",
]


PRIORS: dict[str, type[Prior]] = {
    kind.name: kind
    for kind in (
        Normal, FanInNormal, LaplacePrior, StudentTPrior, FlowPrior, ScaleMixture, Hierarchical,
    )
}  # fmt: skip
PriorSpec = str | Prior | Mapping[str, Prior]


def prior(spec: PriorSpec | None) -> Prior | Mapping[str, Prior]:
    """A prior from its name or an object; None is Normal(1.0). A mapping of patterns is returned
    unchanged."""
    if spec is None:
        return Normal()
    if isinstance(spec, str):
        if spec not in PRIORS:
            known = ", ".join(sorted(PRIORS))
            raise ModelError(f"no prior is called {spec!r}; there are {known}")
        return PRIORS[spec]()
    if isinstance(spec, Prior):
        return spec
    if isinstance(spec, Mapping) and all(isinstance(part, Prior) for part in spec.values()):
        return spec
    if isinstance(spec, type) and issubclass(spec, Prior):
        raise ModelError(f"a prior is a name or an object: {spec.__name__}(), not its class")
    raise ModelError(
        "a prior is a name, an object, or {name pattern: object}, got " + type(spec).__name__
    )


def bind(spec: PriorSpec | None, layout: Layout) -> BoundPrior:
    """The prior of every element of a layout.

    The patterns of a mapping {pattern: Prior} are compared with the names of the entries. They are
    shell patterns; the first match is used, and "*" is tried last. Entries without a match have
    Normal(1.0). A pattern that matches no name is an error.
    """
    chosen = each_prior(spec, layout)
    groups: dict[type[Family], list[tuple[Entry, Prior]]] = {}
    for entry, its_prior in zip(layout.entries, chosen, strict=True):
        groups.setdefault(its_prior.density, []).append((entry, its_prior))
    if not groups:
        groups = {GaussianFamily: []}  # no parameters: log p = 0
    parts = [_part(family, members, layout) for family, members in groups.items()]
    return BoundPrior(parts, layout.size)


def each_prior(spec: PriorSpec | None, layout: Layout) -> list[Prior]:
    """The prior of each entry of a layout."""
    named = prior(spec)
    table = {"*": named} if isinstance(named, Prior) else named
    patterns = sorted(table, key=lambda pattern: pattern == "*")
    unused = set(patterns) - {"*"}
    chosen: list[Prior] = []
    for name in layout.names:
        matches = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        unused.difference_update(matches)
        if name.startswith("likelihood."):
            chosen.append(Normal(1.0))
        else:
            chosen.append(table[matches[0]] if matches else Normal(1.0))
    if unused:
        raise ModelError(
            f"prior pattern {min(unused)!r} matches no parameter; there are "
            + ", ".join(layout.names)
        )
    return chosen


def _part(family: type[Family], members: list[tuple[Entry, Prior]], layout: Layout) -> Part:
    entries = [entry for entry, _ in members]
    sizes = torch.tensor([entry.size for entry in entries], dtype=torch.long)

    def spread(values: list[float]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), sizes)

    settings = [its_prior.settings(entry) for entry, its_prior in members]
    names = settings[0] if settings else Normal().settings(Entry("", ()))
    exact = {name: spread([values[name] for values in settings]) for name in names}
    if family.grouped:
        exact["group"] = spread([float(g) for g in range(len(entries))])
    loc = spread([entry.centre for entry in entries])
    return Part(
        slice(None) if len(entries) == len(layout.entries) else _place(entries, layout),
        loc if bool(loc.any()) else None,
        family(exact, torch.device("cpu"), torch.float64),
    )


def _place(entries: list[Entry], layout: Layout) -> slice | Tensor:
    """A slice where the entries are contiguous, else their positions."""
    positions = layout.index(entry.name for entry in entries)
    if positions.numel() == 0:
        return slice(0, 0)
    first = int(positions[0])
    if int(positions[-1]) - first + 1 == positions.numel():
        return slice(first, first + positions.numel())
    return positions
