"""The tangent kernel of any network of finite width, at its weights, as products.

    Θ̂(x, x') = J(x) J(x')ᵀ,   J = ∂f/∂θ:    Θ̂v = J(x) (J(x')ᵀv)

A product with v is one backward pass at x' and one forward-mode pass at x (Novak et al. 2022); the
Jacobian [N, O, P] is never stored. A block of the kernel is such a product with some unit vectors
at a time, for all members at once. For a wide network, Θ̂ of random weights is near Θ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from doxa.errors import ModelError, ShapeError

Weights = Mapping[str, Tensor]

_PRODUCT_BYTES = 64 << 20  # of weight-sized vectors at a time


def ntk_product(
    net: nn.Module, x: Tensor, other: Tensor, v: Tensor, params: Weights | None = None
) -> Tensor:
    """Θ̂(x, x')v: v [N', *output] to [N, *output], at the network's weights or at `params`."""
    f = _function(net)
    weights = _weights(net, params)
    return _product(f, weights, x, other, v)


def empirical_ntk(
    net: nn.Module, x: Tensor, other: Tensor | None = None, params: Weights | None = None, *,
    members: bool = False, outputs: str = "mean", chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """Θ̂ between rows x [N, ...] and other [N', ...], or between rows of x.

    Parameters
    ----------
    net : nn.Module
        The network.
    x, other : Tensor
        The rows; `other` is x by default.
    params : dict of str to Tensor, optional
        Weights by name. Default: those of the network.
    members : bool
        Whether the weights have a leading axis M.
    outputs : {"mean", "all"}
        "mean" over outputs of ∂f_o ∂f_oᵀ, [(M,) N, N'], whose limit is Θ; "all" pairs of outputs,
        [(M,) N, N', O, O].
    chunk : int, optional
        Unit vectors at a time. Default: as many as 64 MiB of weights allow.

    Returns
    -------
    Tensor
        Θ̂ in the shape above.
    """
    if outputs not in ("mean", "all"):
        raise ModelError(f'outputs must be "mean" or "all", not {outputs!r}')
    other = x if other is None else other
    weights = {k: v.detach() for k, v in _weights(net, params).items()}
    count = {len(v) for v in weights.values()} if members else {1}
    if len(count) != 1:
        raise ShapeError(f"params of members have leading axes {sorted(count)}: they must agree")
    f = _function(net)

    def of(weights: dict[str, Tensor]) -> Tensor:
        return _matrix(f, weights, x, other, outputs, size)

    floats = sum(v.numel() for v in weights.values())
    size = chunk or max(1, _PRODUCT_BYTES // (4 * max(1, floats)))
    if not members:
        return of(weights)
    return vmap(of)(weights)


def _matrix(
    f: Callable[..., Tensor], weights: dict[str, Tensor], x: Tensor, other: Tensor, outputs: str,
    size: int,
) -> Tensor:  # fmt: skip
    """The kernel column by column. A unit vector is one row of x' and one of its outputs."""

    def column(row: Tensor, unit: Tensor) -> Tensor:
        back = vjp(lambda w: f(w, row.unsqueeze(0)).reshape(-1), weights)[1]
        found: Tensor = jvp(lambda w: f(w, x).reshape(len(x), -1), (weights,), back(unit))[1]
        return found  # [N, O]

    made = f(weights, other[:1]).reshape(-1)
    width = len(made)
    eye = torch.eye(width, dtype=made.dtype, device=made.device)
    rows = other.repeat_interleave(width, 0)  # [N' O, ...]
    units = eye.repeat(len(other), 1)
    parts = [
        vmap(column)(rows[a : a + size], units[a : a + size]) for a in range(0, len(rows), size)
    ]
    whole = torch.cat(parts).unflatten(0, (len(other), width))  # [N', O', N, O]
    if outputs == "all":
        return whole.permute(2, 0, 3, 1)
    return whole.diagonal(dim1=1, dim2=3).mean(-1).mT


def _product(
    f: Callable[..., Tensor], weights: dict[str, Tensor], x: Tensor, other: Tensor, v: Tensor
) -> Tensor:
    back = vjp(lambda w: f(w, other), weights)[1]
    found: Tensor = jvp(lambda w: f(w, x), (weights,), back(v))[1]
    return found


def _function(net: nn.Module) -> Callable[..., Tensor]:
    """f(weights, x), with the network in prediction mode: no dropout, fixed BatchNorm
    statistics."""
    fixed = {k: v.detach() for k, v in net.named_buffers()}

    def f(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Any = functional_call(net, {**fixed, **weights}, (x,))
        return found

    if any(part.training and isinstance(part, _NOISY) for part in net.modules()):
        raise ModelError("the network has dropout or BatchNorm in training: call net.eval() first")
    return f


_NOISY = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


def _weights(net: nn.Module, params: Weights | None) -> dict[str, Tensor]:
    own = {k: v for k, v in net.named_parameters() if v.requires_grad}
    if params is None:
        return {k: v.detach() for k, v in own.items()}
    missing = sorted(own.keys() - params.keys())
    if missing:
        raise ModelError(f"params lack the network's {missing[:3]}")
    return {k: params[k] for k in own}
