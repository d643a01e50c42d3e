"""Expected information gain against quadrature, closed forms and a discrete oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Binomial,
    Categorical,
    Independent,
    MultivariateNormal,
    Normal,
    Poisson,
    Uniform,
)  # fmt: skip

from doxa.decide import eig
from doxa.decide.design import Box, Choices, Experiment, Sequence
from doxa.decide.design.draws import outcomes_of
from doxa.decide.design.variational import Mixture
from doxa.errors import DataError, MethodError, NumericalError, ShapeError, Unavailable

# θ ~ N(7, 2), y ~ Bernoulli(sigmoid(θ − l)), by adaptive quadrature in other software
WORKING_MEMORY = [0.0222, 0.0444, 0.0796, 0.1265, 0.1766, 0.2161, 0.2311]


def span(dtype: torch.dtype = torch.float64) -> Experiment:
    lengths = torch.arange(1, 16, dtype=dtype)
    prior = Normal(torch.tensor(7.0, dtype=dtype), torch.tensor(2.0, dtype=dtype))
    return Experiment(prior, lambda t, d: Bernoulli(logits=t - d), space=Choices(lengths))


def line(noise: float = 0.5) -> Experiment:
    """y = Xθ + ε of three numbers, where the design is X [3, 2] and θ ~ N(0, S)."""

    def likelihood(theta: Tensor, x: Tensor) -> Independent:
        mean = (x @ theta.unsqueeze(-1)).squeeze(-1)
        return Independent(Normal(mean, torch.tensor(noise).to(mean)), 1)

    prior = MultivariateNormal(torch.zeros(2).double(), SPREAD)
    return Experiment(prior, likelihood, space=Box(-3 * torch.ones(3, 2).double(), 3.0))


SPREAD = torch.tensor([[1.0, 0.4], [0.4, 0.5]], dtype=torch.float64)
X = torch.tensor(
    [[[1.0, 0], [0, 1], [1, 1]], [[0.3, 0.1], [0.1, 0.3], [0, 0.2]]], dtype=torch.float64
)


def line_exact(noise: float = 0.5) -> Tensor:
    """½ log det(I + X S Xᵀ/σ²)"""
    return 0.5 * torch.logdet(torch.eye(3).double() + X @ SPREAD @ X.mT / noise**2)


def test_the_working_memory_table() -> None:
    found = eig(span(), None, "exact")
    torch.testing.assert_close(
        found.values[:7], torch.tensor(WORKING_MEMORY).double(), atol=5e-5, rtol=0
    )
    torch.testing.assert_close(found.values[:6].flip(0), found.values[7:13])  # symmetric about 7
    assert float(found.values[13]) == pytest.approx(0.0101, abs=5e-5)
    assert float(found.best_design) == 7.0


def test_the_discrete_oracle() -> None:
    """θ ~ Bern(.4), y ~ Bern((d + θ)/2), d = .5: a sum of four terms."""
    oracle = Experiment(
        Bernoulli(torch.tensor(0.4).double()), lambda t, d: Bernoulli((d + t) / 2), space=Box(0, 1)
    )
    at = torch.tensor([0.5]).double()
    assert float(eig(oracle, at, "exact").values) == pytest.approx(0.125804, abs=1e-6)
    drawn = eig(oracle, at, "enumerated", outer=40_000)
    assert float(drawn.values) == pytest.approx(0.125804, abs=4 * float(drawn.errors))


def test_nested_monte_carlo_to_a_thousandth() -> None:
    """Two million draws against 5,000 contrasts; the standard error is 4e-4, the bias 1e-5."""
    found = eig(span(torch.float32), [3.0, 7.0], "nmc", outer=2_000_000, inner=5000)
    assert found.errors.max() < 6e-4 and found.bias is not None and found.bias.max() < 1e-4
    torch.testing.assert_close(found.values, torch.tensor([0.0796, 0.2311]), atol=1e-3, rtol=0)


def test_the_stated_bias_is_the_bias() -> None:
    """With ten contrasts NMC is far too high, by what it says to first order."""
    found = eig(span(), [7.0], "nmc", outer=400_000, inner=10)
    excess = float(found.values) - 0.2311
    assert found.bias is not None
    assert excess > 8 * float(found.errors)
    assert float(found.bias) == pytest.approx(excess, rel=0.25)


@pytest.mark.parametrize(("noise", "inner"), [(0.1, 10), (0.01, 10), (0.01, 1000), (0.5, 100)])
def test_the_stated_bias_is_not_below_the_bias(noise: float, inner: int) -> None:
    """y = θ + σε: ½ log(1 + 1/σ²). With contrasts that miss the posterior the excess is of many
    nats, and what is stated is it to first order where that holds, else a bound of it."""
    one = torch.tensor(1.0).double()
    line = Experiment(Normal(0 * one, one), lambda t, d: Normal(t, noise * d), space=[1.0])
    found = eig(line, None, "nmc", outer=20_000, inner=inner)
    excess = float(found.values) - 0.5 * math.log1p(noise**-2)
    assert found.bias is not None
    assert float(found.bias) > excess - 4 * float(found.errors)
    assert float(found.bias) < 1.5 * excess + 4 * float(found.errors)


def truth_table(d: Tensor) -> Tensor:
    """Three outcomes under two θ, one impossible under the first, one under both."""
    none = torch.full_like(d, -torch.inf)
    first = torch.stack([0 * d, none, none], -1)
    second = torch.stack([torch.sigmoid(d).log(), torch.sigmoid(-d).log(), none], -1)
    return torch.stack([first, second])


def zeros() -> Experiment:
    """θ of two equal values: I = H((1 + s)/2) − H(s)/2, where s = sigmoid(d)."""

    def likelihood(theta: Tensor, d: Tensor) -> Categorical:
        table = truth_table(d)
        return Categorical(logits=torch.where(theta.unsqueeze(-1) > 0.5, table[1], table[0]))

    two = Bernoulli(torch.tensor(0.5).double())
    return Experiment(two, likelihood, space=Box(-3.0, 3.0))


@pytest.mark.parametrize("estimator", ["exact", "enumerated", "pce", "nmc", "marginal"])
def test_outcomes_of_probability_zero(estimator: str) -> None:
    """0 log 0 = 0, in values and in gradients."""
    entropy = lambda p: torch.special.entr(p) + torch.special.entr(1 - p)  # noqa: E731
    d = torch.tensor([-1.0, 0.5], dtype=torch.float64, requires_grad=True)
    s = d.sigmoid()
    exact = entropy((1 + s) / 2) - entropy(s) / 2
    counts = {} if estimator == "exact" else {"outer": 20_000}
    at = d.detach() if estimator == "marginal" else d
    found = eig(zeros(), at, estimator, **counts)
    assert ((found.values - exact).abs() < 4 * found.errors + 1e-12).all()
    if estimator == "marginal":
        return
    (slope,) = torch.autograd.grad(found.values.sum(), d)
    (true,) = torch.autograd.grad(exact.sum(), d)
    torch.testing.assert_close(slope, true, atol=1e-9 if estimator == "exact" else 0.02, rtol=0)


def test_coins_that_always_fall_on_one_side() -> None:
    """A logit of −∞ is a probability of 0: with one sure coin of each kind, y tells θ: log 2."""
    one = torch.tensor(1.0).double()
    two = Bernoulli(0.5 * one)
    likelihood = lambda t, d: Bernoulli(logits=torch.where(t > 0.5, torch.inf * d, -torch.inf * d))  # noqa: E731
    sure = Experiment(two, likelihood, space=[1.0])
    for estimator in ("exact", "pce"):
        found = eig(sure, None, estimator)
        assert float(found.values) == pytest.approx(math.log(2), abs=0.02)


def test_contrasts_that_all_exclude_an_outcome() -> None:
    """A lower bound has a gradient there; an upper one is infinite, and says what to do."""
    one = torch.tensor(1.0).double()
    likelihood = lambda t, d: Uniform(d * (t - 1e-6), d * (t + 1e-6))  # noqa: E731
    sharp = Experiment(Normal(0 * one, one), likelihood, space=Box(0.5, 2.0))
    d = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    found = eig(sharp, d, "pce", outer=64, inner=10)
    assert float(found.values.detach()) == pytest.approx(math.log(11), abs=1e-3)
    (slope,) = torch.autograd.grad(found.values.sum(), d)
    assert float(slope) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(NumericalError, match="probability 0 under all of its 10 contrasts"):
        eig(sharp, d.detach(), "nmc", outer=64, inner=10)


def test_prior_contrasts_saturate() -> None:
    """Where y tells everything: log(L + 1)."""
    sure = Experiment(Normal(0.0, 1.0), lambda t, d: Normal(t * d, 1e-4), space=Box(0, 1))
    found = eig(sure, [1.0], "pce", outer=200, inner=15)
    assert float(found.values) == pytest.approx(math.log(16), abs=1e-3)


@pytest.mark.parametrize("estimator", ["enumerated", "nmc", "pce", "marginal"])
def test_every_estimator_is_within_its_error(estimator: str) -> None:
    designs = [4.0, 7.0, 9.0]
    truth = eig(span(), designs, "exact").values
    found = eig(span(), designs, estimator, outer=20_000)
    away = (found.values - truth) / found.errors
    assert away.abs().max() < 4


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["ba", "vnmc", "infonce"])
def test_what_is_learned_is_within_its_error(estimator: str) -> None:
    """A lower bound is not above, an upper one not below; what was not learned is < .01 here."""
    designs = [4.0, 7.0, 9.0]
    truth = eig(span(), designs, "exact").values
    found = eig(span(), designs, estimator, outer=20_000)
    side = 1 if found.kind == "lower bound" else -1
    assert (side * (found.values - truth) < 3 * found.errors).all()
    assert (side * (truth - found.values) < 3 * found.errors + 0.01).all()


def test_bounds_bracket_a_linear_model() -> None:
    """Three standard errors a side, six comparisons: one false alarm in 120 seeds."""
    truth = line_exact()
    low = eig(line(), X, "pce", outer=2000, inner=500)
    high = eig(line(), X, "nmc", outer=2000, inner=500)
    assert (low.values < truth + 3 * low.errors).all()
    assert (high.values > truth - 3 * high.errors).all()
    assert (high.values - low.values > 0).all()
    torch.testing.assert_close(low.values, truth, atol=0.1, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["ba", "vnmc", "marginal"])
def test_learned_gaussians_are_exact_on_a_linear_model(estimator: str) -> None:
    """The posterior and p(y | d) are Gaussian: the bounds are tight."""
    found = eig(line(), X, estimator, outer=20_000)
    torch.testing.assert_close(found.values, line_exact(), atol=0.05, rtol=0)


def test_contrasts_of_a_simulator_saturate() -> None:
    """y = 20 θ + ε tells θ from three others nearly always: InfoNCE comes to log 4, and never
    above."""
    draws = lambda n, generator: torch.randn(n, generator=generator)  # noqa: E731

    def simulator(theta: Tensor, d: Tensor, generator: torch.Generator) -> Tensor:
        return 20 * theta * d + torch.randn(theta.shape, generator=generator)

    sure = Experiment(draws, simulator=simulator, space=Box(0.0, 1.0))
    found = eig(sure, [1.0], "infonce", outer=2000, inner=3, steps=150)
    assert math.log(4) - 0.2 < float(found.values) <= math.log(4)


@pytest.mark.slow
def test_a_simulator_without_a_density() -> None:
    """y = dθ + ε, only drawn: I = ½ log(1 + d²), of which InfoNCE finds most and no more."""

    def simulator(theta: Tensor, d: Tensor, generator: torch.Generator) -> Tensor:
        return theta * d + torch.randn(theta.shape, generator=generator)

    draws = lambda n, generator: torch.randn(n, generator=generator)  # noqa: E731
    found = eig(
        Experiment(draws, simulator=simulator, space=Box(0.0, 3.0)), [0.5, 2.0], "infonce",
        steps=100,
    )  # fmt: skip
    truth = 0.5 * torch.log1p(torch.tensor([0.25, 4.0]))
    assert (found.values < truth + 3 * found.errors).all() and found.kind == "lower bound"
    assert (found.values > 0.7 * truth).all()


def test_gradients_by_the_design() -> None:
    """y = dθ + ε: d EIG/dd = d/(1 + d²), through y; and of coins, by the score function."""
    one = torch.tensor(1.0).double()
    shift = Experiment(Normal(0 * one, one), lambda t, d: Normal(t * d, one), space=Box(0.0, 4.0))
    d = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(eig(shift, d, "pce", outer=8000, inner=500).values.sum(), d)
    torch.testing.assert_close(slope, (d / (1 + d.square())).detach(), atol=0.03, rtol=0)

    free = Experiment(span().prior, span().likelihood, space=Box(1.0, 15.0))
    length = torch.tensor([5.0], dtype=torch.float64, requires_grad=True)
    (true,) = torch.autograd.grad(eig(free, length, "exact").values.sum(), length)
    ends = eig(free, torch.tensor([4.999, 5.001]).double(), "exact").values
    assert float(true) == pytest.approx(float(ends[1] - ends[0]) / 0.002, rel=1e-3)
    drawn = eig(free, length, "nmc", outer=200_000, inner=500).values.sum()
    (score,) = torch.autograd.grad(drawn, length)
    assert float(score) == pytest.approx(float(true), abs=0.005)  # about .045; without: near 0


def test_memory_does_not_change_a_value() -> None:
    """Blocks only bound memory."""
    from doxa.decide.design import variational

    whole = eig(line(), X, "nmc", outer=640, inner=50).values
    before = dict(variational._BLOCK)
    variational._BLOCK["cpu"] = 700
    try:
        torch.testing.assert_close(eig(line(), X, "nmc", outer=640, inner=50).values, whole)
    finally:
        variational._BLOCK.update(before)


def test_mistakes_are_named() -> None:
    with pytest.raises(MethodError, match="no estimator is called 'nmcc'; did you mean 'nmc'"):
        eig(span(), [7.0], "nmcc")
    with pytest.raises(DataError, match=r"design 1 is 16.0, outside Choices\(1.0"):
        eig(span(), [7.0, 16.0], "exact")
    with pytest.raises(ShapeError, match="one row for each design"):
        eig(span(), [[7.0]], "exact")
    with pytest.raises(MethodError, match="exact takes no outer, but nodes"):
        eig(span(), [7.0], "exact", outer=10)
    counts = Experiment(Normal(0.0, 1.0), lambda t, d: Poisson((t * d).exp()), space=[1, 2])
    with pytest.raises(MethodError, match="whole numbers without end"):
        eig(counts, None, "marginal")
    with pytest.raises(MethodError, match="outcomes are not discrete"):
        eig(line(), X, "enumerated")
    flat = Experiment(Normal(0.0, 1.0), lambda t, d: Normal(t.squeeze(), 1.0), space=[1, 2])
    with pytest.raises(ShapeError, match="batch shape"):
        eig(flat, None, "pce")

    def broken(theta: Tensor, d: Tensor, generator: torch.Generator) -> Tensor:
        return torch.where(theta > 0, theta / 0.0 * 0.0, theta) * d

    normal = lambda n, generator: torch.randn(n, generator=generator)  # noqa: E731
    with pytest.raises(DataError, match=r"an outcome is nan at θ = .*, design 1.0"):
        eig(Experiment(normal, simulator=broken, space=[1, 2]), None, "infonce")
    with pytest.raises(MethodError, match="no likelihood"):
        eig(Experiment(normal, simulator=broken, space=[1, 2]), None, "pce")
    with pytest.raises(Unavailable, match="density of the prior is not known"):
        eig(Experiment(normal, lambda t, d: Normal(t * d, 1.0), space=[1, 2]), None, "ba")
    odd = Experiment(
        Normal(0.0, 1.0), lambda t, d: Bernoulli(t * d, validate_args=True), space=[1, 2]
    )
    with pytest.raises(NumericalError, match="the parameters of the likelihood are not valid"):
        eig(odd, None, "nmc")


def test_spaces() -> None:
    both = Sequence([Choices([1.0, 2.0]), Box(0.0, 1.0)])
    assert both.grid(9).shape == (6, 2)
    assert both.check([[1.0, 0.5], [2.0, 1.0]]).shape == (2, 2)
    with pytest.raises(DataError, match="design 0"):
        both.check([[1.5, 0.5]])
    near = both.nearest(torch.tensor([[1.4, 3.0]]))
    assert near.tolist() == [[1.0, 1.0]]


def test_the_outcomes_of_a_count() -> None:
    """All of them, where they are few and the same for every design; None where they are not."""
    few = outcomes_of(Binomial(3, torch.tensor([0.2, 0.7])))
    assert few is not None and few.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert outcomes_of(Binomial(10**6, torch.tensor(0.5))) is None
    assert outcomes_of(Binomial(torch.tensor([3, 4]), torch.tensor(0.5))) is None


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e6])
def test_a_choice_is_found_in_any_precision_and_unit(unit: float) -> None:
    """1/3 in single precision differs from 1/3 by 3e-8 of it; 1 % beside it is another design."""
    third = unit / 3
    space = Choices(torch.tensor([third, 2 * unit], dtype=torch.float32))
    assert space.inside(torch.tensor([third, 2 * unit], dtype=torch.float64)).tolist() == [True] * 2
    assert space.inside(torch.tensor([1.01 * third], dtype=torch.float64)).tolist() == [False]


def test_draws_of_a_mixture_have_its_moments() -> None:
    """For each of three designs, two parts in the plane: mean Σ π μ, and second
    moment Σ π ((WᵀW)⁻¹ + μμᵀ). Of 20,000 draws, five standard errors."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    share, mean = normal(3, 2).softmax(-1), 3 * normal(3, 2, 2)
    whiten = normal(3, 2, 2, 2).tril(-1) + torch.diag_embed(0.5 + normal(3, 2, 2).abs())
    drawn = Mixture(share.log(), mean, whiten).draw(20_000, generator)  # [n, 3, 2]
    centre = torch.einsum("dk,dkp->dp", share, mean)
    within = torch.linalg.inv(whiten.mT @ whiten)
    second = torch.einsum("dk,dkpq->dpq", share, within + mean.unsqueeze(-1) * mean.unsqueeze(-2))
    error = 5 * drawn.std(0) / math.sqrt(20_000)
    assert ((drawn.mean(0) - centre).abs() < error).all()
    products = drawn.unsqueeze(-1) * drawn.unsqueeze(-2)
    error = 5 * products.std(0) / math.sqrt(20_000)
    assert ((products.mean(0) - second).abs() < error).all()
