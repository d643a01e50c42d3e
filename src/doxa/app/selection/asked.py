"""What was asked: networks and priors under labels, and rows that are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import nn

from doxa.app.comparison.splits import Split, random_splits
from doxa.errors import DataError, ModelError
from doxa.priors import Normal, Prior
from doxa.priors import prior as named_prior

FOUND = "scale found"


def pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError("data is a pair (x, y) of arrays or tensors")
    return data[0], data[1]


def labelled(nets: Any) -> dict[str, nn.Module]:
    if isinstance(nets, nn.Module):
        nets = [nets]
    if not isinstance(nets, Mapping):
        nets = {f"net {k}": net for k, net in enumerate(nets)}
    wrong = [f"{k!r}: {type(v).__name__}" for k, v in nets.items() if not isinstance(v, nn.Module)]
    if wrong or not nets:
        given = wrong[0] if wrong else "none"
        raise ModelError(f"nets is a network, a list, or {{label: network}}, not {given}")
    return {str(label): net for label, net in nets.items()}


def beliefs(priors: Any) -> dict[str, Any]:
    """{label: prior, or None where its scale is to be found}."""
    if isinstance(priors, str | Prior) or not hasattr(priors, "__len__") or not len(priors):
        raise ModelError(f"priors is a list, or {{label: prior}}, not {priors!r}")
    pairs = priors.items() if isinstance(priors, Mapping) else [(None, p) for p in priors]
    made: dict[str, Any] = {}
    for label, given in pairs:
        number = isinstance(given, Real) and not isinstance(given, bool)
        belief = Normal(float(given)) if number else None if given is None else named_prior(given)
        name = str(label if label is not None else FOUND if given is None else words(belief))
        if name in made:
            raise ModelError(f"prior {name!r} is given twice; a mapping gives each a label")
        made[name] = belief
    return made


def words(belief: Any) -> str:
    return repr(belief) if isinstance(belief, Prior) else f"{len(belief)} patterns"


def families(beliefs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Priors that can be runs of one fit: of one family, on the same weights."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, belief in beliefs.items():
        table = belief if isinstance(belief, Mapping) else {"*": belief}
        key = tuple((pattern, getattr(p, "family", None)) for pattern, p in table.items())
        groups.setdefault(key, {})[name] = belief
    return list(groups.values())


def splits(
    splits: int | Sequence[Split], rows: int, test_fraction: float, seed: int
) -> Sequence[Split]:
    if not isinstance(splits, int):
        return [Split(np.asarray(train), np.asarray(test)) for train, test in splits]
    if test_fraction == 0:
        return [Split(np.arange(rows), np.arange(0))]
    return random_splits(rows, test_fraction, splits, seed)


def inner(split: Split, share: float, seed: int, k: int) -> Split:
    """The training rows, once more divided."""
    parts = random_splits(len(split.train), share, 1, seed + 7919 * (k + 1))[0]
    return Split(split.train[parts.train], split.train[parts.test])
