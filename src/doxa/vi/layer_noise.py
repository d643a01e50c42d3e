"""Noise of layers in training, drawn in few calls; and which layers' weights are their own."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from torch import nn

from doxa.data import Batch, batch_rows
from doxa.linalg.layout import Params
from doxa.method import Clock, Run
from doxa.model.layers import Site


def layer_noise(
    run: Run, batch: Batch, clock: Clock, sites: Collection[str] | None = None
) -> Params:
    """What layers take in training, or some of it, as `run.layer_noise`, but in one call for all
    that does not depend on the rows, and one for each number of entries that a row has: calls take
    their time."""
    groups: dict[tuple[str, int], dict[str, Site]] = {}
    for name, site in run.net.sites.items():
        if site.use != "prediction" and (sites is None or name in sites):
            groups.setdefault((site.kind, site.rows), {})[name] = site
    found: Params = {}
    for (kind, entries), own in groups.items():
        sizes = [math.prod(site.shape) for site in own.values()]
        if entries:
            drawn = clock.rows(kind, batch_rows(batch) * entries, sum(sizes))
        else:
            drawn = (clock.noise if kind == "normal" else clock.uniform)(sum(sizes))
        for (name, site), part in zip(own.items(), drawn.split(sizes, -1), strict=True):
            found[name] = part.unflatten(-1, site.shape)
    return found


def alone(layer: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    """Whether no other layer has the same weight."""
    holders = [one for one in layers.values() for p in one.parameters(recurse=False)
               if p is layer.weight]  # fmt: skip
    return len(holders) == 1


def under(path: str, leaf: str) -> str:
    """The full name of a layer's tensor."""
    return f"{path}.{leaf}" if path else leaf
