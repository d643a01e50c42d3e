"""Priors against scipy and automatic differentiation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor
from torch.func import grad, hessian, vmap

import doxa
from doxa.errors import MethodError, ModelError
from doxa.linalg.layout import Entry, Layout
from doxa.priors import (
    BoundPrior,
    FanInNormal,
    FlowPrior,
    LaplacePrior,
    Normal,
    Prior,
    ScaleMixture,
    StudentTPrior,
    bind,
    prior,
    stack_bound,
)

LAYOUT = Layout(
    (
        Entry("first.weight", (3, 4), fan_in=4),
        Entry("first.bias", (3,)),
        Entry("norm.weight", (3,), centre=1.0),
        Entry("last.weight", (2, 3), fan_in=3),
        Entry("likelihood.log_noise", ()),
    )
)
PRIORS: dict[str, Any] = {
    "normal": Normal(0.7),
    "fan-in": FanInNormal(1.5),
    "laplace": LaplacePrior(0.4),
    "student-t": StudentTPrior(df=4.0, scale=0.3),
    "mixture": ScaleMixture(0.3, 1.2, 0.1),
    "flow": FlowPrior(0.6, tail=0.8),
    "mixed": {"*.weight": LaplacePrior(0.5), "norm.*": Normal(0.2), "*": StudentTPrior(5.0, 0.6)},
}
GAUSSIAN = ("normal", "fan-in")
every = pytest.mark.parametrize("name", PRIORS)


def flat(*lead: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((*lead, LAYOUT.size), generator=generator, dtype=torch.float64)


def mixture_logpdf(x: Any) -> Any:
    wide, narrow = stats.norm(0, 1.2).logpdf(x), stats.norm(0, 0.1).logpdf(x)
    return np.logaddexp(np.log(0.3) + wide, np.log(0.7) + narrow)


def log_densities(name: str) -> dict[str, Callable[[Any], Any]]:
    """The log density of each entry, from scipy, as functions of the values."""
    one: Callable[[Any], Any] = {
        "normal": stats.norm(0, 0.7).logpdf,
        "laplace": stats.laplace(0, 0.4).logpdf,
        "student-t": stats.t(4.0, 0, 0.3).logpdf,
        "mixture": mixture_logpdf,
        "flow": stats.johnsonsu(0, 1 / 0.8, 0, 0.6 / 0.8).logpdf,
        "fan-in": None,
        "mixed": None,
    }[name]
    each = dict.fromkeys(LAYOUT.names, one)
    each["norm.weight"] = lambda x: one(np.asarray(x) - 1.0)
    if name == "fan-in":
        stds = {"first.weight": 0.75, "first.bias": 1.5, "last.weight": 1.5 / 3**0.5}
        each |= {key: stats.norm(0, std).logpdf for key, std in stds.items()}
        each["norm.weight"] = stats.norm(1, 1.5).logpdf
    if name == "mixed":
        each["first.weight"] = each["last.weight"] = stats.laplace(0, 0.5).logpdf
        each["norm.weight"] = stats.laplace(1, 0.5).logpdf  # "*.weight" comes before "norm.*"
        each["first.bias"] = stats.t(5.0, 0, 0.6).logpdf
    each["likelihood.log_noise"] = stats.norm(0, 1).logpdf
    return each


@every
@pytest.mark.parametrize("stacked", [False, True])
def test_the_prior_of_some_elements_is_their_share_of_it(name: str, stacked: bool) -> None:
    """Elements are independent: two parts that make up the whole add up to it."""
    bound = bind(PRIORS[name], LAYOUT)
    bound = stack_bound([bound, bound]) if stacked else bound
    at = flat(2)
    index = torch.tensor([3, 13, 14, 16, 17, 24])  # of every entry
    others = torch.tensor([i for i in range(LAYOUT.size) if i not in index])
    some, rest = (bound.of(where) for where in (index, others))
    total = some.log_prob(at[:, index]) + rest.log_prob(at[:, others])
    torch.testing.assert_close(total, bound.log_prob(at), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(some.score(at[:, index]), bound.score(at)[:, index])
    assert some.is_gaussian == (name in GAUSSIAN)


@every
def test_log_prob_against_scipy(name: str) -> None:
    w = flat(2, 3)
    wanted = sum(
        log_densities(name)[key](value.reshape(2, 3, -1).numpy()).sum(-1)
        for key, value in LAYOUT.unflatten(w).items()
    )
    np.testing.assert_allclose(bind(PRIORS[name], LAYOUT).log_prob(w), wanted, rtol=1e-12)


@every
def test_score_and_curvature_are_derivatives(name: str) -> None:
    bound, w = bind(PRIORS[name], LAYOUT), flat(3, seed=1)
    torch.testing.assert_close(
        bound.score(w), vmap(grad(bound.log_prob))(w), rtol=1e-11, atol=1e-11
    )
    curved = -vmap(hessian(bound.log_prob))(w)
    torch.testing.assert_close(torch.diag_embed(bound.curvature(w)), curved, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(vmap(bound.score)(w), bound.score(w))


@settings(max_examples=50, deadline=None)
@given(x=st.floats(-200, 200), weight=st.floats(0.01, 0.99), small=st.floats(1e-3, 1.0))
def test_scale_mixture_is_stable(x: float, weight: float, small: float) -> None:
    layout = Layout((Entry("w", (1,)),))
    bound = ScaleMixture(weight, 1.0, small).bind(layout)
    w = torch.tensor([x], dtype=torch.float64)
    wanted = np.logaddexp(
        np.log(weight) + stats.norm(0, 1).logpdf(x),
        np.log1p(-weight) + stats.norm(0, small).logpdf(x),
    )
    assert float(bound.log_prob(w)) == pytest.approx(wanted, rel=1e-10)
    assert torch.isfinite(bound.score(w)).all()
    assert torch.isfinite(bound.curvature(w)).all()


@pytest.mark.parametrize("name", [n for n in PRIORS if n != "mixed"])
def test_densities_integrate_to_one(name: str) -> None:
    bound = bind(PRIORS[name], Layout((Entry("w", (), centre=0.5),)))

    def density(x: float) -> float:
        return float(bound.log_prob(torch.tensor([x], dtype=torch.float64)).exp())

    halves = [
        integrate.quad(density, *ends, limit=200)[0] for ends in ((-np.inf, 0.5), (0.5, np.inf))
    ]
    assert sum(halves) == pytest.approx(1.0, abs=1e-6)


@every
def test_draws_follow_the_density(name: str) -> None:
    """Kolmogorov-Smirnov for every entry: 30 tests at 1e-5, so 3 in 10,000 seeds would fail."""
    draws = bind(PRIORS[name], LAYOUT).sample(4000, torch.Generator().manual_seed(0))
    assert draws.shape == (4000, LAYOUT.size)
    grid = np.sinh(np.linspace(-9, 9, 40001))  # +-4000, dense at 0
    for key, values in LAYOUT.unflatten(draws).items():
        density = np.exp(log_densities(name)[key](grid))
        cdf = integrate.cumulative_trapezoid(density, grid, initial=0)
        p = stats.kstest(values.flatten().numpy(), lambda x, c=cdf: np.interp(x, grid, c)).pvalue
        assert p > 1e-5, (key, p)


@every
def test_mean_and_precision(name: str) -> None:
    bound = bind(PRIORS[name], LAYOUT)
    assert bound.mean.tolist() == LAYOUT.per_element(e.centre for e in LAYOUT.entries).tolist()
    if name in GAUSSIAN:
        assert bound.precision is not None
        torch.testing.assert_close(bound.precision, bound.curvature(flat()))
        assert bound.precision[-1] == 1.0  # the likelihood's own is N(0, 1)
    else:
        assert bound.precision is None


@pytest.mark.parametrize("name", ["normal", "laplace", "student-t", "mixture", "flow", "mixed"])
def test_a_stack_is_its_runs_side_by_side(name: str) -> None:
    def wider(p: Any, factor: float) -> Any:
        if isinstance(p, dict):
            return {key: wider(part, factor) for key, part in p.items()}
        scales = {f: getattr(p, f) * factor for f in vars(p) if f not in ("df", "weight")}
        return dataclasses.replace(p, **scales)

    runs = [bind(wider(PRIORS[name], factor), LAYOUT) for factor in (0.5, 1.0, 3.0)]
    stacked = stack_bound(runs)
    assert stacked.runs == (3,)
    w = flat(2, 3)
    for method in ("log_prob", "score", "curvature"):
        apart = [getattr(run, method)(w[:, r]) for r, run in enumerate(runs)]
        torch.testing.assert_close(getattr(stacked, method)(w), torch.stack(apart, 1))
        some = getattr(stacked[1:], method)(w[:, 1:])
        torch.testing.assert_close(some, torch.stack(apart[1:], 1))
    one = stacked[2]
    assert one.runs == ()
    torch.testing.assert_close(one.log_prob(w[:, 2]), runs[2].log_prob(w[:, 2]))
    torch.testing.assert_close(
        stacked[torch.tensor([2, 0])].mean, torch.stack([r.mean for r in runs])[[2, 0]]
    )
    draws = stacked.sample(5, torch.Generator().manual_seed(0))
    assert draws.shape == (5, 3, LAYOUT.size)


def test_stacks_need_one_family() -> None:
    runs = [bind(Normal(), LAYOUT), bind(LaplacePrior(), LAYOUT)]
    with pytest.raises(MethodError, match="same families"):
        stack_bound(runs)
    both = stack_bound([runs[0], bind(FanInNormal(), LAYOUT)])  # both Gaussian
    assert both.is_gaussian
    with pytest.raises(MethodError):
        stack_bound([both, both])
    with pytest.raises(MethodError, match="not a stack"):
        runs[0][0]


def test_types_keep_the_constants() -> None:
    bound = bind(Normal(0.013), LAYOUT)
    single = bound.to("cpu", torch.float32)
    w = flat(4) * 0.013
    assert single.log_prob(w.float()).dtype == torch.float32
    torch.testing.assert_close(
        single.log_prob(w.float()).double(), bound.log_prob(w), rtol=1e-6, atol=0
    )
    assert single.sample(2, torch.Generator().manual_seed(0)).dtype == torch.float32


def test_patterns() -> None:
    def stds(spec: Any) -> list[float]:
        bound: BoundPrior = bind(spec, LAYOUT)
        assert bound.precision is not None
        return [
            round(float(v.flatten()[0]) ** -0.5, 6)
            for v in LAYOUT.unflatten(bound.precision).values()
        ]

    assert stds({"*": Normal(3.0), "first.*": Normal(2.0)}) == [2, 2, 3, 3, 1]
    assert stds({"*.weight": Normal(2.0)}) == [2, 1, 2, 2, 1]
    assert stds({"first.bias": Normal(4.0), "first.*": Normal(2.0)}) == [2, 4, 1, 1, 1]
    assert stds({"likelihood.*": Normal(9.0)}) == [1, 1, 1, 1, 1]  # a noise prior is never improper
    assert stds(None) == [1, 1, 1, 1, 1]
    with pytest.raises(ModelError, match=r"'frist.\*' matches no parameter"):
        bind({"frist.*": Normal()}, LAYOUT)


def test_nothing_to_believe_about() -> None:
    empty = bind(Normal(), Layout(()))
    assert empty.log_prob(torch.zeros(4, 0)).tolist() == [0.0] * 4
    assert empty.score(torch.zeros(4, 0)).shape == (4, 0)
    void = Layout((Entry("a", (0, 3)), Entry("likelihood.s", ())))
    assert bind(LaplacePrior(), void).sample(2, torch.Generator()).shape == (2, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Normal(0.0),
        lambda: Normal(float("nan")),
        lambda: FanInNormal(-1.0),
        lambda: LaplacePrior(float("inf")),
        lambda: StudentTPrior(df=0.0),
        lambda: ScaleMixture(weight=1.0),
        lambda: prior("norma"),
        lambda: prior({"*": 3}),  # type: ignore[dict-item]
    ],
)
def test_unusable_settings(wrong: Callable[[], Prior]) -> None:
    with pytest.raises(ModelError):
        wrong()


def test_names_and_equality() -> None:
    assert prior("normal") == Normal(1.0) == prior(None)
    assert prior("scale-mixture") == ScaleMixture()
    assert hash(Normal(2.0)) == hash(Normal(2.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Normal().std = 2.0  # type: ignore[misc]


LARGE_SPECS = {
    "normal": doxa.Normal(0.5), "fan-in": doxa.FanInNormal(0.7), "laplace": doxa.LaplacePrior(0.3),
    "student-t": doxa.StudentTPrior(), "mixture": doxa.ScaleMixture(),
    "several": {"a": doxa.Normal(0.1), "b": doxa.LaplacePrior(1.0), "*": doxa.Normal(2.0)},
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE_SPECS)
def test_a_prior_of_a_large_layout_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are one number per tensor: densities, scores in place, and parts of them."""
    layout = Layout(
        (Entry("a", (30, 20), 20), Entry("b", (30,), 1, 1.0), Entry("c", (7,), 7),
         Entry("likelihood.log_noise", (1,)))
    )  # fmt: skip
    x = torch.randn(2, layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = bind(LARGE_SPECS[name], layout).to("cpu", torch.float64)
    monkeypatch.setattr("doxa.priors.base.LARGE", 1)
    large = bind(LARGE_SPECS[name], layout).to("cpu", torch.float64)
    for what in ("log_prob", "score", "curvature"):
        torch.testing.assert_close(getattr(large, what)(x), getattr(plain, what)(x))
    assert large.shared_precision == plain.shared_precision
    for where in layout.slices.values():
        for own in (large, plain):
            slope = torch.zeros(where.stop - where.start, dtype=torch.float64)
            own.add_score_(slope, x[0, where], where, -0.3)
            torch.testing.assert_close(slope, -0.3 * plain.score(x)[0, where])
    index = torch.arange(590, 631)
    torch.testing.assert_close(
        large.of(index).log_prob(x[:, index]), plain.of(index).log_prob(x[:, index])
    )
