"""A recorded step is the same function after it was made lean, or spelled out for a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from doxa.engine.simplify import expand_products, reuse_memory, simplify

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
    spelled = expand_products(simplify(module, [a, b, bias]))
    assert products(spelled) == kept
    torch.testing.assert_close(spelled(a, b, bias), step(a, b, bias), rtol=1e-13, atol=1e-13)


def test_scaled_sums_are_left_alone() -> None:
    a, b, c = drawn((3, 5, 1), (3, 1, 4), (3, 5, 4))
    step = lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0)  # noqa: E731
    module = expand_products(make_fx(step)(a, b, c))
    assert products(module) == ["baddbmm"]
    torch.testing.assert_close(module(a, b, c), step(a, b, c))


def test_a_networks_gradient_spelled_out_is_the_same() -> None:
    x, w, v = drawn((20, 3), (4, 7, 3), (4, 7))

    def gradient(w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        w, v = w.detach().requires_grad_(), v.detach().requires_grad_()
        f = torch.bmm(torch.tanh(x @ w.mT), v.unsqueeze(2)).squeeze(2)
        return torch.autograd.grad(-0.5 * f.square().sum(), (w, v))

    module = simplify(make_fx(gradient)(w, v), [w, v])
    want = [each.clone() for each in module(w, v)]
    spelled = expand_products(module)
    for got, expected in zip(spelled(w, v), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def operations(module: Any) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_a_sum_of_products_is_replayed_in_little_memory() -> None:
    """θ + η g + s ε: one fresh tensor, by a fused product and a sum in its memory."""

    def step(theta: Tensor, grad: Tensor, eps: Tensor, eta: Tensor) -> list[Tensor]:
        return [theta + eta * grad + 0.5 * eps]

    given = [*drawn((3, 4), (3, 4), (3, 4)), torch.tensor(0.1, dtype=torch.float64)]
    kept = [t.clone() for t in given]
    want = step(*given)[0]
    lean = reuse_memory(simplify(make_fx(step)(*given), given))
    assert operations(lean) == ["aten.addcmul.default", "aten.add_.Tensor"]
    assert torch.allclose(lean(*given)[0], want, rtol=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))  # inputs are left alone


def test_quotients_are_written_over_what_nobody_reads_again() -> None:
    """The variance of an IVON step, 2v/(1 + u²)."""

    def step(u: Tensor, v: Tensor) -> list[Tensor]:
        half = v.new_full((), 0.5)
        moved = u * v
        return [torch.addcdiv(half, v, torch.addcmul(half, moved, moved, value=0.5))]

    given = list(drawn((3, 4), (3, 4)))
    kept, want = [t.clone() for t in given], step(*given)[0]
    lean = reuse_memory(simplify(make_fx(step)(*given), given))
    assert operations(lean) == ["aten.mul.Tensor", "aten.addcmul.out", "aten.addcdiv.out"]
    assert torch.equal(lean(*given)[0], want)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))  # inputs are left alone


def test_constants_are_computed_once_also_where_an_argument_is_overwritten() -> None:
    """As an optimiser does to weights that are its own: no constant is made of these, nor of a
    constant's copy that is written to. What is read beside them, here a weight, may be anything."""
    noise = drawn((1,))[0]

    def step(theta: Tensor, grad: Tensor) -> list[Tensor]:
        copy = noise.clone()
        copy.add_(grad[0, 0])
        theta.lerp_(grad, theta.new_full((), 0.5) * copy * (-2.0 * noise).exp())
        return [theta]

    theta, grad = drawn((3, 4), (3, 4))
    want = torch.lerp(theta, grad, 0.5 * (noise + grad[0, 0]) * torch.exp(-2.0 * noise))
    lean = simplify(make_fx(step)(theta.clone(), grad), [theta.clone(), grad])
    assert not [name for name in operations(lean) if "exp" in name or "full" in name]
    for _ in range(2):
        assert torch.equal(lean(theta.clone(), grad)[0], want)


def test_constants_are_computed_once_also_where_what_was_just_made_is_overwritten() -> None:
    """As torch's fused Adam says of the gradients it is given, though it writes to none."""
    noise = drawn((1,))[0]

    def step(theta: Tensor, grad: Tensor) -> list[Tensor]:
        scaled = grad * (-2.0 * noise).exp()
        scaled.sub_(theta)
        return [scaled]

    theta, grad = drawn((3, 4), (3, 4))
    lean = simplify(make_fx(step)(theta, grad), [theta, grad])
    assert operations(lean) == ["aten.mul.Tensor", "aten.sub_.Tensor"]
    assert torch.equal(lean(theta, grad)[0], grad * torch.exp(-2.0 * noise) - theta)


def test_a_constant_that_is_written_to_through_a_view_is_none() -> None:
    noise = drawn((4,))[0]

    def step(grad: Tensor) -> list[Tensor]:
        copy = 2.0 * noise
        copy.view(2, 2).add_(grad[0, 0])
        return [copy]

    (grad,) = drawn((3, 4))
    lean = simplify(make_fx(step)(grad), [grad])
    for _ in range(2):
        assert torch.equal(lean(grad)[0], 2.0 * noise + grad[0, 0])


def test_what_is_read_again_is_not_written_over() -> None:
    """A value with two readers, one that is an output, and one that is a view of an input."""

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        a = x * y
        b = a + x
        c = a - y  # a is read twice
        d = b * 2  # b is an output, too
        e = x.T.reshape(4, 3).T + y  # a view first
        return [b, c, d, e, (x * x) * (x * x)]

    given = drawn((3, 4), (3, 4))
    kept = [t.clone() for t in given]
    want = step(*given)
    lean = reuse_memory(simplify(make_fx(step)(*given), given))
    for got, expected in zip(lean(*given), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))


def test_broadcast_and_mixed_types_are_left_as_they_are() -> None:
    def step(x: Tensor, row: Tensor, whole: Tensor) -> list[Tensor]:
        return [row * 2.0 + x, (row + 1) * x, x.float() * 2 + x, (whole + 1) * x]

    given = [*drawn((3, 4), (1, 4)), torch.arange(4)]
    want = step(*given)
    lean = reuse_memory(simplify(make_fx(step)(*given), given))
    for got, expected in zip(lean(*given), want, strict=True):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-6)
