"""Transforms: there and back, Jacobians against autograd, and densities that integrate to one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jacrev, vmap

import doxa
from doxa import store, transforms
from doxa.density.transforms import (
    Interval,
    Lower,
    Ordered,
    Positive,
    Real,
    Simplex,
    Transform,
    Upper,
)
from doxa.errors import MethodError, ShapeError

ALL: list[Transform] = [
    Real(), Positive(), Positive(soft=True), Lower(-2.5), Upper(4.0), Interval(), Interval(-3, 7),
    Simplex(), Ordered(), Ordered(positive=True),
]  # fmt: skip
SHAPES = st.sampled_from([(2,), (3,), (5,), (2, 3)])


def free_values(shape: tuple[int, ...], seed: int, scale: float = 2.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("own", ALL, ids=repr)
@given(shape=SHAPES, seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_there_and_back(own: Transform, shape: tuple[int, ...], seed: int) -> None:
    """Rounding costs the inverse the conditioning of the map: 1e-10 for |u| up to some eight."""
    u = free_values(own.free_shape(shape), seed)
    x, _ = own.forward(u)
    assert x.shape == shape
    assert own.holds(x)
    assert torch.allclose(own.inverse(x), u, rtol=1e-9, atol=1e-10)
    again, _ = own.forward(own.inverse(x))
    assert torch.allclose(again, x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("own", ALL, ids=repr)
@given(size=st.integers(2, 6), seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_the_jacobian_is_that_of_autograd(own: Transform, size: int, seed: int) -> None:
    u = free_values(own.free_shape((size,)), seed)
    coordinates = len(u)  # a simplex is measured by its first K − 1 entries
    jacobian = jacrev(lambda u: own.forward(u)[0][:coordinates])(u)
    expected = torch.linalg.slogdet(jacobian)
    _, log_det = own.forward(u)
    total = torch.zeros(()).double() if log_det is None else log_det.sum()
    assert abs(float(expected.sign)) == 1
    assert float(total) == pytest.approx(float(expected.logabsdet), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("own", ALL, ids=repr)
def test_leading_axes_are_batches(own: Transform) -> None:
    u = free_values((4, *own.free_shape((2, 3))), 3)
    x, log_det = own.forward(u)
    each = [own.forward(row) for row in u]
    assert torch.allclose(x, torch.stack([row for row, _ in each]), rtol=1e-14)
    assert torch.allclose(vmap(lambda row: own.forward(row)[0])(u), x, rtol=1e-14)
    if log_det is not None:
        assert torch.allclose(log_det, torch.stack([row for _, row in each]), rtol=1e-13)
        assert log_det.shape == ((4, 2) if own.vector else (4, 2, 3))


def gamma(x: Tensor) -> Tensor:
    return 2 * math.log(1.5) + x.log() - 1.5 * x  # Gamma(2, rate 1.5)


LINE = {
    Positive(): gamma,
    Positive(soft=True): gamma,
    Lower(-2.5): lambda x: gamma(x + 2.5),
    Upper(4.0): lambda x: gamma(4.0 - x),
    Interval(): lambda x: math.log(60) + 2 * x.log() + 3 * torch.log1p(-x),  # Beta(3, 4)
    Interval(-3, 7): lambda x: torch.full_like(x, -math.log(10)),
}


@pytest.mark.parametrize("own", LINE, ids=repr)
def test_densities_on_the_line_integrate_to_one(own: Transform) -> None:
    """The trapezoid rule converges faster than any power for such smooth, decaying functions."""
    u = torch.linspace(-40, 40, 20_001, dtype=torch.float64)
    x, log_det = own.forward(u)
    assert log_det is not None
    mass = torch.trapezoid(torch.nan_to_num((LINE[own](x) + log_det).exp()), u)
    assert float(mass) == pytest.approx(1.0, abs=1e-9)


def test_densities_of_vectors_integrate_to_one() -> None:
    u = torch.cartesian_prod(*[torch.linspace(-22, 22, 601, dtype=torch.float64)] * 2)
    cell = (44 / 600) ** 2
    x, log_det = Simplex().forward(u)
    assert log_det is not None
    power = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)  # Dirichlet(2, 3, 1.5)
    constant = torch.lgamma(power.sum() + 3) - torch.lgamma(power + 1).sum()
    mass = ((power * x.log()).sum(-1) + constant + log_det).exp().sum() * cell
    assert float(mass) == pytest.approx(1.0, abs=1e-6)
    for own, per_axis in ((Ordered(), math.log(2)), (Ordered(positive=True), math.log(8))):
        x, log_det = own.forward(u)  # two normals (half normals), sorted
        assert log_det is not None
        logs = -0.5 * x.square().sum(-1) - math.log(2 * math.pi) + per_axis
        assert float((logs + log_det).exp().sum() * cell) == pytest.approx(1.0, abs=1e-6)


def test_the_centre_of_a_simplex_is_zero() -> None:
    x, _ = Simplex().forward(torch.zeros(4, dtype=torch.float64))
    assert torch.allclose(x, torch.full((5,), 0.2, dtype=torch.float64), rtol=1e-14)


def test_far_tails_stay_finite() -> None:
    for own in (Positive(soft=True), Interval(), Simplex()):
        _, log_det = own.forward(torch.tensor([-700.0, 700.0], dtype=torch.float64))
        assert log_det is not None
        assert torch.isfinite(log_det).all(), own


def test_names_and_what_is_refused() -> None:
    assert transforms.transform("unit") == Interval(0.0, 1.0)
    assert transforms.transform("positive-ordered") == Ordered(positive=True)
    assert doxa.density.transforms is transforms
    for spec in ("postive", 3.0, Positive):
        with pytest.raises(MethodError):
            transforms.transform(spec)
    with pytest.raises(MethodError, match="did you mean 'positive'"):
        transforms.transform("postive")
    for low, high in ((1.0, 1.0), (2.0, 1.0), (-math.inf, 0.0), (math.nan, 1.0)):
        with pytest.raises(MethodError, match="finite bounds"):
            Interval(low, high)
    for shape in ((), (1,)):
        with pytest.raises(ShapeError):
            Simplex().free_shape(shape)


@pytest.mark.parametrize("own", ALL, ids=repr)
def test_stored_and_read_back(own: Transform) -> None:
    assert store.decode(store.encode(own)) == own


@pytest.mark.parametrize(
    ("own", "outside"),
    [
        (Positive(), [0.0]), (Lower(1.0), [1.0]), (Upper(1.0), [1.5]), (Interval(), [1.0]),
        (Simplex(), [0.5, 0.6]), (Simplex(), [0.0, 1.0]), (Ordered(), [1.0, 1.0]),
        (Ordered(positive=True), [-1.0, 1.0]), (Real(), [math.nan]),
    ],
)  # fmt: skip
def test_what_lies_outside_is_seen(own: Transform, outside: list[float]) -> None:
    assert not own.holds(torch.tensor(outside, dtype=torch.float64))
