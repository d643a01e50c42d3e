"""Gradients per row of scales and shifts of norms: the closed form, against derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from doxa.laplace.layers import Leaf

NORMS = [
    (nn.BatchNorm1d(6), (6,)), (nn.BatchNorm1d(6), (6, 3)), (nn.BatchNorm2d(6), (6, 4, 5)),
    (nn.GroupNorm(2, 6), (6, 4, 5)), (nn.InstanceNorm2d(6, affine=True), (6, 4, 5)),
    (nn.LayerNorm(6), (6,)), (nn.LayerNorm(6, bias=False), (3, 6)),
    (nn.LayerNorm((3, 6)), (2, 3, 6)), (nn.RMSNorm(6), (3, 6)),
]  # fmt: skip


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("norm", NORMS, ids=[str(norm) for norm in NORMS])
def test_they_are_the_derivatives(norm: tuple[nn.Module, tuple[int, ...]], members: int) -> None:
    module, shape = norm
    module = module.double().eval()
    draw = torch.Generator().manual_seed(0)
    normal = lambda *size: torch.randn(*size, generator=draw, dtype=torch.float64)  # noqa: E731
    own = {k: normal(members, *v.shape) for k, v in module.named_parameters()}
    buffers: dict[str, Any] = {}
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        buffers = {"running_mean": normal(members, 6), "running_var": 0.5 + normal(members, 6) ** 2}
    a, g = normal(members, 4, 1, *shape), normal(2, members, 4, 1, *shape)  # [M, B], [R, M, B]
    leaf = Leaf(module, {k: f"n.{k}" for k in own}, ["n"])
    called = ({f"n.{k}": v for k, v in kind.items()} for kind in (own, buffers))
    found = dict(leaf.slopes(g, a, *called))
    for m in range(members):
        for row in range(4):
            given = {k: v[m].requires_grad_() for k, v in own.items()}
            out = functional_call(module, given | {k: v[m] for k, v in buffers.items()}, a[m, row])
            for r in range(2):
                each = torch.autograd.grad(out, [*given.values()], g[r, m, row], retain_graph=True)
                for name, want in zip(given, each, strict=True):
                    value = found[f"n.{name}"][m, r, row]
                    torch.testing.assert_close(value, want.flatten(), rtol=1e-10, atol=1e-12)
