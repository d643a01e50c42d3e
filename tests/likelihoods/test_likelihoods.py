"""Likelihoods against scipy, numerical integration and automatic differentiation."""

from __future__ import annotations

import likelihood_rows
import numpy as np
import pytest
import torch
from likelihood_rows import theta_of
from scipy import stats
from torch import Tensor
from torch.func import grad, hessian, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from doxa.errors import DataError, ShapeError
from doxa.likelihoods import (
    LIKELIHOODS,
    Affine,
    Bernoulli,
    Categorical,
    Gaussian,
    Heads,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    ScaledNoise,
    StudentT,
    likelihood,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


LOC, SCALE = torch.tensor([3.0, -1.0]).double(), torch.tensor([2.0, 0.5]).double()
# name: (likelihood, output shape, theta of one member)
CASES: dict[str, tuple[Likelihood, tuple[int, ...], dict[str, Tensor]]] = {
    name: (*case, theta_of(name, case[1])) for name, case in likelihood_rows.cases().items()
} | {
    "gaussian, one output": (Gaussian(), (1,), {"log_noise": number(0.4)}),
    "gaussian, no output axis": (Gaussian(), (), {"log_noise": number(0.4)}),
    "gaussian, image": (Gaussian(), (2, 3, 2), {"log_noise": number(0.2)}),
    "gaussian, per output": (Gaussian(per_output=True), (2,), {"log_noise": randn(2, seed=1)}),
    "gaussian, given": (Gaussian(noise=[0.5, 2.0]), (2,), {}),
    "gaussian, given, one output": (Gaussian(noise=0.5), (1,), {}),
    "heteroscedastic, image": (HeteroscedasticGaussian(), (2, 3), {}),
    "student-t, given": (StudentT(df=4.5, scale=0.7), (2,), {}),
    "bernoulli, tempered": (Bernoulli(temperature=1.7), (2,), {}),
    "categorical, tempered": (Categorical(temperature=0.6), (4,), {}),
    "categorical, image": (Categorical(ignore_index=-1), (3, 2, 2), {}),
    "categorical, weighted": (Categorical(class_weight=[1.0, 2.0, 0.5]), (3,), {}),
    "negative-binomial, given": (NegativeBinomial(concentration=[0.6, 40.0]), (2,), {}),
    "scaled gaussian": (ScaledNoise(Gaussian()), (4,), {"log_noise": number(0.4)}),
    "scaled student-t": (ScaledNoise(StudentT(df=4.5)), (4,), {"log_scale": number(-0.2)}),
    "affine gaussian": (Affine(Gaussian(noise=0.5), LOC, SCALE), (2,), {}),
    "affine heteroscedastic": (Affine(HeteroscedasticGaussian(), LOC, SCALE), (4,), {}),
    "affine student-t": (
        Affine(StudentT(), LOC, SCALE),
        (2,),
        {"log_scale": number(-0.2), "log_df": number(0.3)},
    ),
}
ROWS, MEMBERS = 5, 3
cases = pytest.mark.parametrize("name", CASES)


def one_member(name: str) -> tuple[Likelihood, Tensor, Tensor, dict[str, Tensor]]:
    """f [N, *output], y [N, *event] and theta of one member."""
    lik, output, theta = CASES[name]
    theta = {**lik.constants(output), **theta}
    f = randn(ROWS, *output, seed=2)
    y = lik.sample(f + 0.3, theta, torch.Generator().manual_seed(3))
    return lik, f, y, theta


def members(name: str) -> tuple[Likelihood, Tensor, Tensor, dict[str, Tensor]]:
    """The same with different f and theta for each of three members."""
    lik, f, y, theta = one_member(name)
    steps = torch.arange(MEMBERS, dtype=torch.float64)
    learned = lik.parameters(f.shape[1:])
    stacked = {
        k: torch.stack([v + 0.1 * s * (k in learned) for s in steps]) for k, v in theta.items()
    }
    return lik, f + randn(MEMBERS, *f.shape, seed=4), y, stacked


@cases
def test_leading_axis_agrees_with_one_member_at_a_time(name: str) -> None:
    lik, f, y, theta = members(name)
    for method in ("log_prob", "mean", "variance", "entropy", "curvature"):
        given_y = (y,) if method == "log_prob" else ()
        call = getattr(lik, method)
        together = call(f, *given_y, theta, lead=1)
        apart = [call(f[m], *given_y, {k: v[m] for k, v in theta.items()}) for m in range(MEMBERS)]
        torch.testing.assert_close(together, torch.stack(apart), rtol=1e-13, atol=1e-13)
        mapped = vmap(lambda f, t, call=call, given_y=given_y: call(f, *given_y, t))(f, theta)
        torch.testing.assert_close(mapped, together, rtol=1e-13, atol=1e-13)
    own_y = y.expand(MEMBERS, *y.shape)
    torch.testing.assert_close(lik.log_prob(f, own_y, theta, 1), lik.log_prob(f, y, theta, 1))
    assert lik.log_prob(f, y, theta, 1).shape == (MEMBERS, ROWS)


@cases
def test_can_be_traced_and_differentiated(name: str) -> None:
    lik, f, y, theta = members(name)

    def total(f: Tensor, theta: dict[str, Tensor]) -> Tensor:
        return lik.log_prob(f, y, theta, 1).sum()

    traced = make_fx(total)(f, theta)
    torch.testing.assert_close(traced(f + 0.5, theta), total(f + 0.5, theta))
    f = f.requires_grad_()
    (slope,) = torch.autograd.grad(total(f, theta), f)
    assert torch.isfinite(slope).all()
    assert slope.abs().sum() > 0


@cases
def test_shapes_and_float32(name: str) -> None:
    lik, f, y, theta = one_member(name)
    event = lik.event(tuple(f.shape[1:]))
    assert tuple(y.shape) == (ROWS, *event)
    # theta stays float64 here: the outputs decide
    single = lik.log_prob(f.float(), lik.prepare_targets(y.float(), tuple(f.shape[1:])), theta)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), lik.log_prob(f, y, theta), rtol=1e-4, atol=1e-4)
    assert lik.mean(f.float(), theta).dtype == torch.float32
    assert lik.variance(f.float(), theta).shape == lik.mean(f, theta).shape
    assert lik.entropy(f, theta).shape == (ROWS, *event)


# Where the Hessian does not depend on y, the curvature is the Hessian itself.
SAME = ("gaussian", "affine gaussian", "poisson", "counts", "bernoulli", "categorical")
CURVED = [n for n in CASES if n.partition(",")[0] in SAME]


@pytest.mark.parametrize("name", CURVED)
def test_curvature_is_minus_the_hessian(name: str) -> None:
    lik, f, y, theta = one_member(name)
    if name == "categorical, image":
        y[0, 0, 1] = y[2] = -1

    def minus(f: Tensor, y: Tensor) -> Tensor:
        return -lik.log_prob(f[None], y[None], theta).sum()

    size = f[0].numel()
    wanted = torch.stack([hessian(minus)(f[i], y[i]).reshape(size, size) for i in range(ROWS)])
    torch.testing.assert_close(lik.curvature(f, theta, y=y), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_curvature_is_the_covariance_of_the_score(name: str) -> None:
    """E[s sᵀ] of s = d log p/df over 60,000 draws of y at one row, within 6 standard errors. The
    score has the mean 0. (This is E[−d² log p/df²] where log p is smooth.)"""
    lik, f, _, theta = one_member(name)
    n = 60_000
    y = lik.sample(f[:1].expand(n, -1), theta, torch.Generator().manual_seed(6))

    def log_p(f: Tensor, y: Tensor) -> Tensor:
        return lik.log_prob(f[None], y[None], theta).sum()

    score = vmap(grad(log_p), (None, 0))(f[0], y)
    assert (score.mean(0).abs() < 6 * score.std(0) / n**0.5 + 1e-10).all()
    each = score.unsqueeze(2) * score.unsqueeze(1)
    error = 6 * each.std(0) / n**0.5 + 1e-10
    found = lik.curvature(f[:1], theta)[0]
    assert ((each.mean(0) - found).abs() < error).all()
    assert (found.diagonal() > error.diagonal()).all()


@pytest.mark.parametrize(
    "name",
    ["heteroscedastic", "student-t", "student-t, given", "scaled gaussian", "scaled student-t"],
)
def test_curvature_is_the_fisher_information(name: str) -> None:
    """E_y of the Hessian, by quadrature over y for one output pair at a time."""
    lik, f, _, theta = one_member(name)
    event = lik.event(tuple(f.shape[1:]))
    grid = torch.linspace(-1, 1, 20001, dtype=torch.float64) * 0.999
    y = (grid / (1 - grid**2))[:, None].expand(-1, *event) * 20  # out to +-10^4
    row = f[0]

    def log_p(f: Tensor, y: Tensor) -> Tensor:
        return lik.log_prob(f[None], y[None], theta).sum()

    # Outputs are independent, so that moving all of y along the diagonal reveals each block.
    curved = vmap(lambda y: -hessian(log_p)(row, y))(y).reshape(len(grid), row.numel(), -1)
    found = lik.curvature(f[:1], theta)[0]
    for j in range(row.numel()):
        centre = j % event[0]
        density = _marginal(lik, f[:1], theta, centre, y[:, 0])
        expected = np.trapezoid((density * curved[:, j, j]).numpy(), y[:, 0].numpy())
        assert found[j, j] == pytest.approx(expected, rel=1e-5)
    assert torch.equal(found, torch.diag(found.diagonal()))


def _marginal(lik: Likelihood, f: Tensor, theta: dict[str, Tensor], j: int, y: Tensor) -> Tensor:
    """p(y_j) on a grid: the other outputs' share of the joint density is divided out."""
    mean = lik.mean(f, theta)[0]
    joint = mean.expand(len(y), -1).clone()
    joint[:, j] = y
    at_mean = mean.clone()[None]
    joint_log = lik.log_prob(f.expand(len(y), -1), joint, theta)
    density = (joint_log - lik.log_prob(f, at_mean, theta)).exp()
    return density / torch.trapezoid(density, y)


@pytest.mark.parametrize("name", [n for n in CASES if "image" not in n and "weighted" not in n])
def test_samples_have_the_mean_and_variance(name: str) -> None:
    """Within 6 standard errors, whose own estimate needs a fourth moment: df >= 4.5 only."""
    lik, f, _, theta = one_member(name)
    if "student" in name:
        theta = {**theta, **({"log_df": number(3.0)} if "log_df" in theta else {})}
    n = 40_000
    draws = lik.sample(f.expand(n, *f.shape), _lead(theta, n), torch.Generator().manual_seed(5), 1)
    if lik.name == "categorical":
        draws = torch.nn.functional.one_hot(draws, f.shape[1]).double()
    mean, variance = lik.mean(f, theta), lik.variance(f, theta)
    assert ((draws.mean(0) - mean).abs() < 6 * (variance / n).sqrt() + 1e-12).all()
    spread = (draws - mean).square()
    if name != "student-t, given":
        assert ((spread.mean(0) - variance).abs() < 6 * spread.std(0) / n**0.5 + 1e-12).all()


def _lead(theta: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    return {k: v.expand(n, *v.shape) for k, v in theta.items()}


def test_affine_is_the_change_of_variables() -> None:
    """log p(y) = log p_z((y - loc) / scale) - sum log scale, one set of scales a run."""
    loc, scale = randn(MEMBERS, 2, seed=7), randn(MEMBERS, 2, seed=8).exp()
    f, y = randn(MEMBERS, ROWS, 2), randn(ROWS, 2, seed=9)
    theta = {"log_noise": randn(MEMBERS, seed=10)}
    lik = Affine(Gaussian(), loc, scale)
    z = (y - loc[:, None]) / scale[:, None]
    wanted = Gaussian().log_prob(f, z, theta, 1) - scale.log().sum(1, keepdim=True)
    torch.testing.assert_close(lik.log_prob(f, y, theta, 1), wanted)
    location = loc[:, None] + scale[:, None] * f
    torch.testing.assert_close(lik.location(f, 1), location)
    again = stats.norm(location, (theta["log_noise"].exp()[:, None] * scale)[:, None])
    np.testing.assert_allclose(lik.log_prob(f, y, theta, 1), again.logpdf(y).sum(-1))


def test_affine_keeps_large_offsets() -> None:
    loc, y = number(1.7e9), np.array([1.7e9 + 0.25])
    lik = Affine(Gaussian(noise=1.0), loc, number(1.0))
    f = torch.zeros(1, 1)
    ready = lik.prepare_targets(y, (1,))
    assert float(lik.log_prob(f, ready, lik.constants((1,)))) == pytest.approx(
        stats.norm.logpdf(0.25), rel=1e-6
    )


def test_given_noise_is_in_units_of_y() -> None:
    constants = Gaussian(noise=0.6).constants((2,), torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(constants["log_noise"].exp(), torch.tensor([0.3, 0.2]).double())
    per_run = Gaussian(noise=[0.6, 1.2]).constants((2,), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    torch.testing.assert_close(
        per_run["log_noise"].exp(), torch.tensor([[0.6, 0.6], [0.2, 0.3]]).double()
    )


def test_ignored_and_weighted_classes() -> None:
    f, y = randn(2, 3, 2, 2), torch.tensor([[[0, 1], [2, -1]], [[-1, -1], [-1, -1]]])
    lik = Categorical(ignore_index=-1)
    log_p = torch.log_softmax(f, 1)
    wanted = log_p[0, 0, 0, 0] + log_p[0, 1, 0, 1] + log_p[0, 2, 1, 0]
    torch.testing.assert_close(lik.log_prob(f, y, {}), torch.stack([wanted, number(0.0)]))
    both = Categorical(ignore_index=-1, class_weight=[1.0, 2.0, 4.0])
    weighted = log_p[0, 0, 0, 0] + 2 * log_p[0, 1, 0, 1] + 4 * log_p[0, 2, 1, 0]
    torch.testing.assert_close(both.log_prob(f, y, {})[0], weighted)
    assert both.tempered
    assert not lik.tempered
    assert both.untempered() == lik
    # Without targets a weighted likelihood's curvature is the expectation over its own classes.
    flat = randn(4, 3)
    lik = Categorical(class_weight=[1.0, 2.0, 4.0])
    theta = lik.constants((3,))
    probs = torch.softmax(flat, 1)
    mean = sum(
        probs[:, c, None, None] * lik.curvature(flat, theta, y=torch.full((4,), c))
        for c in range(3)
    )
    torch.testing.assert_close(lik.curvature(flat, theta), mean)


def test_heads_add_up() -> None:
    lik = likelihood(("gaussian", Categorical(), HeteroscedasticGaussian()))
    assert isinstance(lik, Heads)
    outputs = ((2,), (3,), (2,))
    assert lik.event(outputs) == ((2,), (), (1,))
    assert list(lik.parameters(outputs)) == ["0.log_noise"]
    f = (randn(MEMBERS, ROWS, 2), randn(MEMBERS, ROWS, 3), randn(MEMBERS, ROWS, 2))
    y = lik.prepare_targets((np.zeros((ROWS, 2)), [0, 1, 2, 1, 0], np.ones(ROWS)), outputs)
    theta = {"0.log_noise": randn(MEMBERS)}
    wanted = (
        Gaussian().log_prob(f[0], y[0], {"log_noise": theta["0.log_noise"]}, 1)
        + Categorical().log_prob(f[1], y[1], {}, 1)
        + HeteroscedasticGaussian().log_prob(f[2], y[2], {}, 1)
    )
    torch.testing.assert_close(lik.log_prob(f, y, theta, 1), wanted)
    curved = lik.curvature(f, theta, 1)
    assert curved.shape == (MEMBERS, ROWS, 7, 7)
    torch.testing.assert_close(curved[..., 2:5, 2:5], Categorical().curvature(f[1], {}, 1))
    assert (curved[..., :2, 2:] == 0).all()
    with pytest.raises(DataError, match="head 1: target at row 2"):
        lik.prepare_targets((np.zeros((ROWS, 2)), [0, 1, 9, 1, 0], np.ones(ROWS)), outputs)


@pytest.mark.parametrize("name", [*LIKELIHOODS, "gaussian, one output"])
def test_targets_are_never_broadcast(name: str) -> None:
    lik, f, y, theta = one_member(name)
    with pytest.raises(ShapeError):
        lik.log_prob(f, y[:1], theta)
    if y.ndim > 1:
        with pytest.raises(ShapeError):
            lik.log_prob(f, y[:, 0], theta)
