"""Noise of layers in training, drawn in few calls; and which layers' weights are their own, and
used by nothing else."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from doxa.data import Batch, batch_rows
from doxa.errors import ModelError
from doxa.linalg.layout import Params
from doxa.method import Clock, Run
from doxa.model.layers import Site
from doxa.model.spread import applied
from doxa.noise import Noise


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


def check_calls(run: Run, paths: Iterable[str], advice: str) -> None:
    """`ModelError` where the network uses the weight or bias of one of these layers besides calling
    the layer: there it would have no noise. With other weights, and layers that give what they gave
    before, the outputs must stay as they are."""
    net, paths = run.net, list(paths)
    weights = net.layout.unflatten(run.start()[0])
    x = run.rows.take(run.rows.rows[0][:2], torch.tensor(0))[0]

    def outputs(paths: list[str], own: Params) -> list[Tensor]:
        def as_before(path: str) -> Any:
            layer: Any = net.net.get_submodule(path)
            weight = weights.get(under(path, "weight"), layer.weight)
            bias = weights.get(under(path, "bias"), getattr(layer, "bias", None))
            return lambda layer, args, _output: applied(layer, args[0], weight, bias)

        hooks = [net.net.get_submodule(p).register_forward_hook(as_before(p)) for p in paths]
        try:
            with torch.no_grad():
                return tree_flatten(net.forward(own, x))[0]
        finally:
            for hook in hooks:
                hook.remove()

    def elsewhere(paths: list[str]) -> bool:
        moved = dict(weights)
        for name in (under(path, leaf) for path in paths for leaf in ("weight", "bias")):
            if name in weights:
                value = weights[name]
                noise = Noise(0, "calls", [0], value.device, value.dtype).normal((value.numel(),))
                moved[name] = value + noise.reshape(value.shape)
        pairs = zip(outputs(paths, dict(weights)), outputs(paths, moved), strict=True)
        return not all(torch.allclose(a, b, 0.0, 0.0, equal_nan=True) for a, b in pairs)

    if not elsewhere(paths):
        return
    for path in paths:
        if elsewhere([path]):
            raise ModelError(
                f"the network uses the weight of layer {path!r} besides calling the layer, and "
                f"noise is put on what the layer gives: {advice}"
            )


def under(path: str, leaf: str) -> str:
    """The full name of a layer's tensor."""
    return f"{path}.{leaf}" if path else leaf
