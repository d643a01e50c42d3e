"""Random features of a composed kernel: z_f with E z_f(x) z_f(x') = k(x, x'), at any rows.

    rbf, matern, rq, periodic   √2 cos(ωᵀx/ℓ + b), ω of the kernel's spectrum (Bochner)
    linear, polynomial          ±gᵀx and products of such, g ~ N(0, I)
    relu1, relu2, relu3         ± the last hidden units of a random network of so many layers
    k₁ + k₂,  k₁ k₂             z₁ + z₂,  z₁ z₂

Rahimi & Recht (2007). A Matérn kernel of ν has Student-t frequencies with 2ν degrees of freedom, a
rational quadratic mixes lengthscales by a gamma distribution (by Wilson and Hilferty's cube), and a
periodic one is an RBF of (cos, sin)(2πx/p). They are the same numbers at every call.
"""

from __future__ import annotations

import functools
import math
import operator

import torch
from torch import Tensor

from doxa.function.composed import Composed, label_of
from doxa.function.grammar import Leaf, Node, Sum
from doxa.linalg.layout import Params
from doxa.noise import Noise

FEATURES = 1024  # in pairs of waves, a quarter turn apart
_FREEDOM = {"matern": 5, "matern12": 1, "matern32": 3, "matern52": 5}  # 2ν


def features(kernel: Composed, hyper: Tensor, x: Tensor) -> Tensor:
    """φ(x) [1, N, F] of one member's hyper-parameters [1, H], with E φ(x)ᵀφ(x') = k(x, x')."""
    values = kernel.layout.unflatten(hyper.exp())
    return _of(kernel.tree, values, x) / math.sqrt(FEATURES)


def _of(node: Node, values: Params, x: Tensor, inside: bool = False) -> Tensor:
    """A tree's features; `inside` a product a single kernel has no variance."""
    if isinstance(node, Sum):
        return functools.reduce(operator.add, (_of(part, values, x) for part in node.parts))
    if isinstance(node, Leaf):
        found = _leaf(node, values, x)
    else:
        parts = (_of(part, values, x, True) for part in node.parts)
        found = functools.reduce(operator.mul, parts)
    variance = None if inside else values.get(f"{label_of(node)}.variance")
    return found if variance is None else variance.sqrt() * found


def _leaf(leaf: Leaf, values: Params, x: Tensor) -> Tensor:
    noise = Noise(0, f"features/{leaf.label}", [0], x.device, x.dtype)
    own = lambda name: values[f"{leaf.label}.{name}"]  # noqa: E731  # [1, 1, 1 or D]
    sign = noise.uniform((1, FEATURES), 0, 1).sub(0.5).sign()
    half = FEATURES // 2
    turn = 2 * math.pi * noise.uniform((1, half), 0, 2)
    turn = torch.cat([turn, turn + math.pi / 2], 2)
    if leaf.name == "constant":
        return sign.expand(1, x.shape[1], -1)
    if leaf.name == "linear":
        return sign * (x @ noise.normal((x.shape[2], FEATURES), 0, 3))
    if leaf.name.startswith("polynomial"):
        wide = torch.cat([x, own("offset").sqrt().expand(1, x.shape[1], 1)], 2)
        each = [
            wide @ noise.normal((wide.shape[2], FEATURES), 0, 4 + i)
            for i in range(int(leaf.name[-1]))
        ]
        return sign * functools.reduce(operator.mul, each)
    if leaf.name.startswith("relu"):
        units = torch.cat([x / own("lengthscale"), torch.ones_like(x[..., :1])], 2)
        for i in range(int(leaf.name[-1])):
            weights = noise.normal((units.shape[2], FEATURES), 0, 4 + i)
            units = math.sqrt(2.0) * (units @ weights).relu() / (math.sqrt(FEATURES) if i else 1.0)
        return sign * units
    if leaf.name == "cosine":  # one column each
        column = (noise.uniform((half,), 0, 3)[0] * x.shape[2]).long() % x.shape[2]
        angle = (2 * math.pi * x / own("period"))[:, :, column.repeat(2)]
        return math.sqrt(2.0) * (angle + turn).cos()
    if leaf.name == "periodic":
        around = 2 * math.pi * x / own("period")
        x = torch.cat([part / own("lengthscale") for part in (around.cos(), around.sin())], 2)
    else:
        x = x / own("lengthscale")
    waves = noise.normal((x.shape[2], half), 0, 3)
    if leaf.name in _FREEDOM:
        freedom = _FREEDOM[leaf.name]
        waves = waves * (freedom / noise.normal((freedom, half), 0, 4).square().sum(1)).sqrt()
    if leaf.name == "rq":
        alpha = own("alpha")
        cube = 1 - 1 / (9 * alpha) + noise.normal((1, half), 0, 4) / (3 * alpha.sqrt())
        waves = waves * (cube.clamp_min(0.0) ** 3).sqrt()
    return math.sqrt(2.0) * ((x @ waves).repeat(1, 1, 2) + turn).cos()
