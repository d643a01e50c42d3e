"""A recorded step is the same function after it was made lean, or spelled out for a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from doxa.engine.simplify import simplified, spelled_out

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def products(module: Any) -> list[str]:
    calls = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return [name for name in _PRODUCTS for call in calls if call == f"aten.{name}.default"]


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


SHAPES = [
    ((3, 5, 1), (3, 1, 4), []),  # an outer product
    ((3, 5, 6), (3, 6, 1), []),  # a matrix times a vector
    ((3, 1, 6), (3, 6, 4), []),  # a vector times a matrix
    ((3, 1, 6), (3, 6, 1), []),  # an inner product
    ((3, 5, 6), (3, 6, 4), ["bmm"]),
    ((5, 6), (6, 1), []),
    ((1, 6), (6, 4), []),
    ((5, 1), (1, 4), []),
    ((5, 6), (6, 4), ["mm"]),
]


@pytest.mark.parametrize(("left", "right", "kept"), SHAPES, ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_products_spelled_out_are_the_same(left: Any, right: Any, kept: Any, added: bool) -> None:
    a, b = drawn(left, right)
    bias = drawn((right[-1],))[0].expand(*left[:-1], right[-1])
    plain = torch.bmm if len(left) == 3 else torch.mm
    plus = torch.baddbmm if len(left) == 3 else torch.addmm

    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return plus(c, a, b) if added else plain(a, b)

    module = make_fx(step)(a, b, bias)
    assert len(products(module)) == 1
    spelled = spelled_out(simplified(module, [a, b, bias]))
    assert products(spelled) == kept
    torch.testing.assert_close(spelled(a, b, bias), step(a, b, bias), rtol=1e-13, atol=1e-13)


def test_scaled_sums_are_left_alone() -> None:
    a, b, c = drawn((3, 5, 1), (3, 1, 4), (3, 5, 4))
    step = lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0)  # noqa: E731
    module = spelled_out(make_fx(step)(a, b, c))
    assert products(module) == ["baddbmm"]
    torch.testing.assert_close(module(a, b, c), step(a, b, c))


def test_a_networks_gradient_spelled_out_is_the_same() -> None:
    x, w, v = drawn((20, 3), (4, 7, 3), (4, 7))

    def gradient(w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        w, v = w.detach().requires_grad_(), v.detach().requires_grad_()
        f = torch.bmm(torch.tanh(x @ w.mT), v.unsqueeze(2)).squeeze(2)
        return torch.autograd.grad(-0.5 * f.square().sum(), (w, v))

    module = simplified(make_fx(gradient)(w, v), [w, v])
    want = [each.clone() for each in module(w, v)]
    spelled = spelled_out(module)
    for got, expected in zip(spelled(w, v), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
