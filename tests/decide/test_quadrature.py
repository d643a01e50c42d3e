"""Posteriors and gains of one number, against scipy's adaptive quadrature and closed forms."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Cauchy,
    Distribution,
    Exponential,
    LogNormal,
    Normal,
    Uniform,
)  # fmt: skip

from doxa.decide import eig
from doxa.decide.design import (
    Box,
    Choices,
    Experiment,
    Sequence,
    Study,
    best_design,
    rehearse,
    working_memory,
)  # fmt: skip
from doxa.decide.design.distributions import Line
from doxa.errors import DataError, NumericalError

Log = Callable[[float], float]


def double(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def moments(log_p: Log, near: float, width: float, low: float, high: float) -> tuple[float, float]:
    """Mean and std of a density, whose mass lies within 40 widths of `near`."""
    a, b = max(low, near - 40 * width), min(high, near + 40 * width)
    ticks = [near + k * width for k in (-8, -4, -2, -1, 0, 1, 2, 4, 8)]
    top = max(log_p(tick) for tick in ticks if a < tick < b)

    def integral(power: int) -> float:
        density = lambda t: (t - near) ** power * math.exp(log_p(t) - top)  # noqa: E731
        inside = [tick for tick in ticks if a < tick < b]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rounding: more digits are asked for than there are
            found = integrate.quad(density, a, b, points=inside, limit=500, epsabs=0, epsrel=1e-10)
        return found[0]

    mean = integral(1) / integral(0)
    return near + mean, math.sqrt(integral(2) / integral(0) - mean**2)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


@pytest.mark.parametrize("std", [2.0, 20.0])
def test_a_posterior_after_200_lists(std: float) -> None:
    """Narrower than any nodes that are fixed beforehand: the nodes follow it, with an error."""
    study = Study(working_memory(7.0, std))
    source = torch.Generator().manual_seed(0)
    told: list[tuple[int, int]] = []
    for i in range(200):
        right = torch.rand((), generator=source) < torch.sigmoid(torch.tensor(7.6 - 7 - i % 2))
        told.append((7 + i % 2, int(right)))
        study.tell(*told[-1])
        if i in (0, 20, 199):
            seen = Counter(told)

            def log_p(theta: float, seen: Counter[tuple[int, int]] = seen) -> float:
                likelihood = (
                    count * log_sigmoid((2 * y - 1) * (theta - length))
                    for (length, y), count in seen.items()
                )
                return -0.5 * ((theta - 7) / std) ** 2 + sum(likelihood)

            mean, width = moments(log_p, float(study.posterior.mean), std, -math.inf, math.inf)
            assert float(study.posterior.mean) == pytest.approx(mean, abs=1e-8)
            assert float(study.posterior.std) == pytest.approx(width, abs=1e-8)
            assert (
                float(study.posterior.mean_error) < 1e-8 and float(study.posterior.std_error) < 1e-8
            )
    assert float(study.gains().values.max()) == pytest.approx(0.0027, abs=2e-4)  # and not 0


def test_a_posterior_of_numbers_is_the_conjugate_one() -> None:
    """θ ~ N(7, 2²), y ~ N(θ, ½²), from one to a million times as narrow as the prior."""
    likelihood = lambda t, d: Normal(t, d)  # noqa: E731
    for noise, count in ((0.5, 100), (1e-3, 5), (1e-6, 2)):
        space = Choices(double([noise]))
        study = Study(Experiment(Normal(double(7.0), double(2.0)), likelihood, space=space))
        source = torch.Generator().manual_seed(1)
        seen = 7.13 + noise * torch.randn(count, generator=source).double()
        for y in seen:
            study.tell(noise, y)
        precision = 0.25 + count / noise**2
        mean = (7 * 0.25 + float(seen.sum()) / noise**2) / precision
        assert float(study.posterior.mean) == pytest.approx(
            mean, abs=max(1e-9 * precision**-0.5, 4e-15)
        )
        assert float(study.posterior.std) == pytest.approx(precision**-0.5, rel=1e-8)
        assert float(study.posterior.std_error) < 1e-8 * precision**-0.5


PRIORS: list[tuple[Distribution, float, float]] = [
    (Uniform(double(-2.0), double(3.0)), -2, 3),
    (Exponential(double(0.7)), 0, math.inf),
    (LogNormal(double(0.0), double(1.5)), 0, math.inf),
    (Cauchy(double(0.0), double(1.0)), -math.inf, math.inf),
]


@pytest.mark.parametrize(("prior", "low", "high"), PRIORS, ids=lambda v: type(v).__name__)
def test_priors_of_any_support(prior: Distribution, low: float, high: float) -> None:
    """Also with the posterior at an end of the support, where an outcome is a surprise."""
    likelihood = lambda t, d: Normal(t * d, double(0.05))  # noqa: E731
    for outcomes in ([0.7, 0.75], [0.01, -0.02]):
        study = Study(Experiment(prior, likelihood, space=Box(double(0.0), double(2.0))))
        for y in outcomes:
            study.tell(double(1.0), double(y))

        def log_p(theta: float, seen: list[float] = outcomes) -> float:
            around = -0.5 * sum(((y - theta) / 0.05) ** 2 for y in seen)
            return float(prior.log_prob(double(theta))) + around

        mean, std = moments(log_p, float(study.posterior.mean), 0.03, low, high)
        assert float(study.posterior.mean) == pytest.approx(mean, abs=1e-8)
        assert float(study.posterior.std) == pytest.approx(std, abs=1e-8)


def test_two_modes_and_an_edge() -> None:
    """y ~ N(θ², .01²) leaves ±√y; y ~ U(θ − ½, θ + ½) cuts the prior: a truncated normal."""
    wide = Box(double(0.0), double(2.0))
    normal = Normal(double(0.1), double(1.0))
    square = Study(Experiment(normal, lambda t, d: Normal(t.square(), 0.01 * d), space=wide))
    square.tell(double(1.0), double(0.81))
    share = 1 / (1 + math.exp(-2 * 0.9 * 0.1))  # of the mode at .9, by the prior's ratio
    at = float(square.posterior.weight[square.posterior.theta > 0].sum())
    assert at == pytest.approx(share, abs=1e-4)
    assert float(square.posterior.mean_error) < 1e-8

    cut = Study(Experiment(normal, lambda t, d: Uniform(t - d / 2, t + d / 2), space=wide))
    for y in (0.9, 1.15):
        cut.tell(double(1.0), double(y))
    exact = stats.truncnorm(0.65 - 0.1, 1.4 - 0.1, loc=0.1)
    assert float(cut.posterior.mean) == pytest.approx(exact.mean(), abs=1e-9)
    assert float(cut.posterior.std) == pytest.approx(exact.std(), abs=1e-9)
    with pytest.raises(DataError, match="impossible"):
        cut.tell(double(1.0), double(3.0))
    assert len(cut.history) == 2


def test_outcomes_that_nothing_explains() -> None:
    far = Experiment(Normal(double(0.0), double(1.0)), lambda t, d: Normal(t, d), space=[1e-9])
    with pytest.raises(NumericalError, match="too far from what the prior"):
        Study(far).tell(1e-9, double(1e4))


def entropy(p: Any) -> Any:
    """Of a coin, in nats."""
    return special.entr(p) + special.entr(1 - p)


def steep(slope: float) -> Experiment:
    likelihood = lambda t, d: Bernoulli(logits=slope * (t - d))  # noqa: E731
    box = Box(double(-3.0), double(3.0))
    return Experiment(Normal(double(0.0), double(1.0)), likelihood, space=box)


@pytest.mark.parametrize("slope", [1.0, 17.0, 1000.0])
def test_an_exact_gain_and_its_error(slope: float) -> None:
    designs = [0.0, 0.5, 2.0]
    found = eig(steep(slope), double(designs), "exact")
    for d, value, error in zip(designs, found.values, found.errors, strict=True):
        ticks = [d + k / slope for k in (-256, -64, -16, -4, -1, 0, 1, 4, 16, 64, 256)]

        def mean(f: Callable[[float], float], at: list[float] = ticks) -> float:
            inside = [tick for tick in at if -12 < tick < 12]
            weighted = lambda t: f(t) * stats.norm.pdf(t)  # noqa: E731
            return integrate.quad(weighted, -12, 12, points=inside, limit=500, epsabs=1e-12,
                                  epsrel=1e-12)[0]  # fmt: skip

        p = lambda t, d=d: special.expit(slope * (t - d))  # noqa: E731
        exact = entropy(mean(p)) - mean(lambda t, p=p: entropy(p(t)))
        assert float(value) == pytest.approx(exact, abs=1e-9)
        assert abs(float(value) - exact) <= float(error) + 1e-11
        assert 0 < float(error) < 1e-8


def test_an_exact_gain_of_steps() -> None:
    """p = .9 above d and .2 below it, at 40 designs: H(p̄) − Φ(−d) H(.9) − Φ(d) H(.2)."""
    likelihood = lambda t, d: Bernoulli(torch.where(t > d, double(0.9), double(0.2)))  # noqa: E731
    box = Box(double(-3.0), double(3.0))
    step = Experiment(Normal(double(0.0), double(1.0)), likelihood, space=box)
    designs = torch.linspace(-2, 2, 40).double()
    found = eig(step, designs, "exact")
    above = stats.norm.sf(designs.numpy())
    exact = entropy(0.9 * above + 0.2 * (1 - above))
    exact = exact - above * entropy(0.9) - (1 - above) * entropy(0.2)
    away = (found.values - torch.from_numpy(exact)).abs()
    assert (away <= found.errors + 1e-11).all() and found.errors.max() < 1e-8


def test_a_discrete_theta_is_a_sum_without_error() -> None:
    prior = Categorical(double([0.2, 0.3, 0.5]))
    coin = Experiment(prior, lambda t, d: Bernoulli((1 + t) * d / 4), space=Choices(double([1.0])))
    assert float(eig(coin, None, "exact").errors) == 0.0
    study = Study(coin)
    for y in (1, 0, 1):
        study.tell(1.0, y)
    chance = double([0.25, 0.5, 0.75])
    weight = double([0.2, 0.3, 0.5]) * chance.square() * (1 - chance)
    torch.testing.assert_close(study.posterior.weight, weight / weight.sum())


def test_a_long_rehearsal_is_the_study() -> None:
    """200 lists: common nodes of all subjects are added where one of them needs them."""
    truth = double([3.0, 7.6, 11.2])
    run = rehearse(working_memory(), truth, 200)
    study = Study(working_memory())
    for row, y in zip(run.designs[:, 1], run.outcomes[:, 1], strict=True):
        study.tell(study.candidates[row], float(y))
    assert float(run.mean[-1, 1]) == pytest.approx(float(study.posterior.mean), abs=1e-8)
    assert float(run.std[-1, 1]) == pytest.approx(float(study.posterior.std), abs=1e-8)
    before = 0.5 * math.log(2 * math.pi * math.e * 4)  # entropy of N(7, 2²)
    torch.testing.assert_close(run.entropy[0], torch.full((3,), before).double())
    after = 0.5 * (2 * math.pi * math.e * run.std[-1].square()).log()  # nearly Gaussian by now
    torch.testing.assert_close(run.entropy[-1], after, atol=1e-2, rtol=0)


def test_draws_of_a_quadrature_are_not_its_nodes() -> None:
    """An instrument a hundred times as sharp as the belief: ½ log(1 + 10⁴) = 4.6 nats, more than
    some tens of nodes can tell apart."""
    likelihood = lambda t, d: Normal(t * d, double(0.01))  # noqa: E731
    sharp = Experiment(Normal(double(0.0), double(1.0)), likelihood, space=Box(0.0, 1.0))
    now = sharp.given(Study(sharp).posterior)
    found = eig(now, double([1.0]), "pce", outer=2000, inner=5000)
    assert float(found.values) == pytest.approx(4.605, abs=4 * float(found.errors) + 0.05)


def test_all_of_a_list_is_compared() -> None:
    """Only one of a hundred designs tells anything."""
    likelihood = lambda t, d: Bernoulli(logits=torch.where(d == 3, 4 * t, 0 * t))  # noqa: E731
    prior = Normal(double(0.0), double(1.0))
    needle = Experiment(prior, likelihood, space=range(1, 101))
    assert float(Study(needle).next()) == 3.0
    assert float(best_design(needle, estimator="exact").design) == 3.0
    many = Choices(torch.arange(1300).double())
    values = eig(Experiment(prior, likelihood, space=many), None, "enumerated", outer=50).values
    assert len(values) == 1300 and int(values.argmax()) == 3 and int((values > 1e-9).sum()) == 1


def test_a_sequence_that_is_too_long_is_improved_part_by_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    best = double([3.0, 17.0, 29.0, 38.0])

    def likelihood(theta: Tensor, d: Tensor) -> Bernoulli:
        return Bernoulli(logits=theta * (-(d - best).square().sum(-1) / 40).exp())

    several = Sequence(Choices(torch.arange(40).double()), 4)
    plan = Experiment(Normal(double(0.0), double(1.0)), likelihood, space=several)
    with caplog.at_level(logging.WARNING, "doxa"):
        study = Study(plan)
    assert "2560000 designs: 16 of them are compared" in caplog.text
    torch.testing.assert_close(study.next(), best)
    torch.testing.assert_close(best_design(plan, estimator="exact").design, best)
    short = Sequence(Choices(torch.arange(9).double()), 3)
    assert len(short.grid(64)) == 9**3


def test_float64_is_not_rounded_on_the_way() -> None:
    """Of designs, outcomes, choices and ends that are Python's numbers, where the prior is float64;
    by a float32 on the way 0.1 would become 0.10000000149."""
    prior = Normal(double(0.0), double(1.0))
    for space in ([0.1, 0.3], Choices([0.1, 0.3]), Box(0.1, 0.3)):
        linear = Experiment(prior, lambda t, d: Normal(t * d, double(0.1)), space=space)
        study = Study(linear, outer=40, inner=10)
        study.tell(0.1, 0.7)
        assert study.history == [(double(0.1), double(0.7))]
        assert float(study.candidates[0]) == 0.1 and float(study.candidates[-1]) == 0.3
        assert study.posterior.theta.dtype == study.gains().values.dtype == torch.float64
    tenth = Experiment(prior, lambda t, d: Bernoulli(logits=t - d), space=Box(0.0, 1.0))
    found = eig(tenth, [0.1], "exact").values
    torch.testing.assert_close(found, eig(tenth, double([0.1]), "exact").values, atol=0, rtol=0)
    both = Sequence([Box(0.1, 0.3), Choices([0.1])])
    pair = Experiment(prior, lambda t, d: Normal(t * d.sum(-1), double(0.1)), space=both)
    assert pair.space.grid(4)[0].tolist() == [0.1, 0.1]
    single = Experiment(Normal(0.0, 1.0), lambda t, d: Bernoulli(logits=t - d), space=[0.1])
    assert eig(single, None, "exact").values.dtype == torch.float32  # nobody asked for more


@pytest.mark.parametrize("low", [-3.0, 0.0, 40.0])
def test_a_line_with_one_end_has_the_median_in_its_middle(low: float) -> None:
    """v = 0 is the median, from either side; θ rises with v by its stated slope."""
    zero = torch.zeros(1).double()
    for line in (Line(low, torch.inf, low + 2, 1.0), Line(-torch.inf, low, low - 2, 1.0)):
        assert float(line.theta(zero)) == pytest.approx(line.centre)
        step = torch.tensor([1e-6]).double()
        slope = (line.theta(step) - line.theta(-step)) / 2e-6
        assert float(slope.log()) == pytest.approx(float(line.log_slope(zero)), abs=1e-6)
