"""Does every weight reach the outputs in a way that autograd sees?

A `detach`, a `no_grad` around a part of the network, a detour through numpy or rounding cut weights
off: the outputs depend on them, their gradient says that they do not, and an optimiser or a sampler
would leave them to the prior without a word. A weight that the outputs do not depend on at all is
nobody's mistake; it follows the prior, as it should.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa.errors import ModelError
from doxa.linalg.layout import Params
from doxa.model import Model
from doxa.noise import Noise


def check_reach(model: Model, start: Tensor, x: Any) -> Any:
    """At one member's start [P] and a few rows: the outputs, or `ModelError` with the names of what
    is cut off."""
    params = model.layout.unflatten(start)
    own = {k: v.detach() for k, v in params.items() if not k.startswith("likelihood.")}
    leaves = {k: v.clone().requires_grad_() for k, v in own.items()}
    with torch.enable_grad():
        f = model.forward(leaves, x)
    suspects = _without_gradient(leaves, f)
    if suspects:
        _check_cut(model, own, suspects, x)
    return f


def _check_cut(model: Model, own: Params, suspects: list[str], x: Any) -> None:
    """The outputs do not change with those weights, or it is an error."""
    before = _outputs(model, own, x)
    if not _same(before, _outputs(model, own, x)):
        return  # a network that draws for itself
    cut = [name for name in suspects if not _same(before, _outputs(model, _pushed(own, name), x))]
    if cut:
        raise ModelError(
            f"the outputs depend on {', '.join(map(repr, cut[:5]))} but have no gradient with "
            "respect to it: look for detach, torch.no_grad, .data, numpy or rounding; weights that "
            "are meant to be fixed need requires_grad_(False)"
        )


def _without_gradient(leaves: Params, f: Any) -> list[str]:
    """Names of the weights that autograd does not find; of all, where every gradient is zero."""
    with torch.enable_grad():
        outputs = [leaf for leaf in tree_flatten(f)[0] if leaf.requires_grad]
        if not outputs:
            return list(leaves)
        total = torch.stack([f.double().square().sum() + f.double().sum() for f in outputs]).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    if not any(g is not None and bool((g != 0).any()) for g in grads):
        return list(leaves)
    return [name for name, grad in zip(leaves, grads, strict=True) if grad is None]


def _outputs(model: Model, own: Params, x: Any) -> list[Tensor]:
    with torch.no_grad():
        return tree_flatten(model.forward(own, x))[0]


def _pushed(own: Params, name: str) -> Params:
    value = own[name]
    noise = Noise(0, "reach", [0], value.device, value.dtype).normal((value.numel(),))[0]
    return own | {name: value + noise.reshape(value.shape)}


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
