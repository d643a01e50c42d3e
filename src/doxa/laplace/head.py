"""A last layer whose output is that of the network, from its features.

    f = W a(x) + b,    (Jδ)(x) = δW a(x) + δb,    Jᵀv = (v aᵀ, v)

The features a are computed once for some rows; products with J then need no pass of the network,
whichever it is. J itself, which has outputs × weights numbers for each row, is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.laplace.layers import Layer
from doxa.linalg.layout import Layout, Params

if TYPE_CHECKING:
    from doxa.laplace.curvature import Jacobians


@dataclass(frozen=True)
class Head:
    """The features of some rows.

    f: the outputs, [M, B, O].
    features: the input of the layer, [M, B, inputs].
    """

    layer: Layer
    layout: Layout
    f: Tensor
    features: Tensor

    @classmethod
    def of(cls, source: Jacobians, x: Any, shared: bool = True) -> Head | None:
        """None where other weights are uncertain too, or something follows the layer. Rows are run
        in blocks."""
        found = source.passes.by_key
        if len(found) != 1 or len(source.passes.hooked) != 1:
            return None
        layer = next(iter(found.values()))
        if layer.embeds or layer.convolves or set(layer.names) != set(source.layout.names):
            return None
        if layer.outputs != source.outputs or layer.weight is None or source.left(x, shared):
            return None
        outputs, features = [], []
        for rows in source.chunks(tree_flatten(x)[0][0].shape[0 if shared else 1], 1, False):
            at = (rows,) if shared else (slice(None), rows)
            made = source.passes(tree_map(lambda t, at=at: t[at], x), shared)
            a = made.positions(layer.key)
            if a.shape[2] != 1:
                return None
            outputs.append(made.f)
            features.append(a[:, :, 0])
        f = torch.cat(outputs, 1)
        head = cls(layer, source.layout, f, torch.cat(features, 1))
        weights = source.own | {k: v for k, v in source.rest.items() if k not in source.own}
        z = head.pushed({k: v.unsqueeze(1) for k, v in source.own.items()})[:, 0]
        bias = layer.module.bias
        if bias is not None and layer.bias is None:  # a bias that is no parameter of the subset
            names = {id(p): name for name, p in source.model.net.named_parameters()}
            z = z + weights.get(names.get(id(bias), ""), bias.detach()[None]).unsqueeze(1)
        scale = float(f.abs().max()) + float(z.abs().max())
        limit = 1e-9 if f.dtype == torch.float64 else 1e-4
        return head if float((z - f).abs().max()) <= limit * scale else None

    def pushed(self, moved: Params) -> Tensor:
        """Jδ for named directions [M, S, ...]: [M, S, B, O]."""
        assert self.layer.weight is not None
        weight = moved[self.layer.weight].to(self.features.dtype)
        weight = weight.mT if self.layer.transposed else weight  # [M, S, out, in]
        found = self.features.unsqueeze(1) @ weight.mT
        if self.layer.bias is not None:
            found = found + moved[self.layer.bias].to(found.dtype).unsqueeze(2)
        return found

    def along(self, delta: Tensor) -> Tensor:
        """Jδ for δ [M, S, p]: [M, S, B, O]."""
        return self.pushed(self.layout.unflatten(delta))

    def back(self, pulls: Tensor) -> Tensor:
        """Σ_b J_bᵀ v_b for v [M, B, O]: [M, p]."""
        assert self.layer.weight is not None
        pulls = pulls.to(self.features.dtype)
        weight = pulls.mT @ self.features
        named = {self.layer.weight: weight.mT if self.layer.transposed else weight}
        if self.layer.bias is not None:
            named[self.layer.bias] = pulls.sum(1)
        return torch.cat([named[name].flatten(1) for name in self.layout.names], -1)
