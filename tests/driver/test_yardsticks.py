"""Yardsticks: held-out predictions against refits by hand, densities, known functions, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

import doxa
from doxa.driver import yardsticks as models
from doxa.driver.yardsticks import Yardstick, why_untested, yardsticks
from doxa.errors import Unavailable
from doxa.likelihoods import Likelihood, assumed

N = 200
NUMBERS = assumed("gaussian")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_name(found: list[Yardstick]) -> dict[str, Yardstick]:
    return {each.name: each for each in found}


def some_rows(link: str, n: int = 40, outputs: int = 2, part: Tensor | None = None) -> models._Rows:
    g = rng(1)
    x = torch.randn(n, 2, generator=g).double()
    f = torch.stack([x[:, 0] - x[:, 1], x[:, 1] ** 2], 1)[:, :outputs]
    y = {
        "mean": f + torch.randn(n, outputs, generator=g),
        "logit": (torch.rand(n, outputs, generator=g) < torch.sigmoid(f)).double(),
        "log": torch.poisson(f.exp().clamp_max(20), generator=g),
        "softmax": torch.nn.functional.one_hot((f[:, 0] > 0).long(), 2).double(),
    }[link].double()
    weight = 0.5 + torch.rand(n, generator=g).double()
    start = torch.zeros(y.shape[1]).double()
    return models._Rows(x, y, weight, part, link, start)


def test_squared_errors_without_a_row_are_those_of_a_refit() -> None:
    rows = some_rows("mean")
    phi = models._with_one(rows.x)
    _, found, penalties = models._squared(rows, phi)
    for p, penalty in enumerate(penalties):
        for i in (0, 17):
            rest = torch.arange(len(phi)) != i
            w = rows.weight[rest, None]
            gram = phi[rest].mT @ (w * phi[rest]) + penalty * torch.eye(3).double()
            by_hand = phi[i] @ torch.linalg.solve(gram, phi[rest].mT @ (w * rows.y[rest]))
            torch.testing.assert_close(found[p, i], by_hand)


def refitted(rows: models._Rows, phi: Tensor, rest: Tensor, penalty: float) -> Tensor:
    """Coefficients by scipy, of the rows `rest`."""
    outputs = rows.y.shape[1]

    def loss(flat: object) -> tuple[float, object]:
        c = torch.tensor(flat).reshape(phi.shape[1], outputs).requires_grad_()
        f = phi[rest] @ c
        if rows.link == "log":
            each = f.exp() - rows.y[rest] * f
        elif rows.link == "logit":
            each = torch.nn.functional.softplus(f) - rows.y[rest] * f
        elif rows.link == "softmax":
            each = -rows.y[rest] * f.log_softmax(1)
        else:
            each = 0.5 * (f - rows.y[rest]).square()
        value = each.sum(1) @ rows.weight[rest] + 0.5 * penalty * c.square().sum()
        value.backward()
        assert c.grad is not None
        return float(value.detach()), c.grad.flatten().numpy()

    start = torch.zeros(phi.shape[1] * outputs).double().numpy()
    best = optimize.minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-9})
    return torch.tensor(best.x).reshape(phi.shape[1], outputs)


@pytest.mark.parametrize("link", ["mean", "logit", "log", "softmax"])
def test_outputs_without_a_part_are_those_of_a_refit(link: str) -> None:
    """Parts of a fifth; rows that no part holds out keep what they are given."""
    part = torch.arange(40) % 5
    part[-8:] = -1
    rows = some_rows(link, part=part)
    phi, penalty = models._with_one(rows.x), torch.tensor(1.0).double()
    whole = refitted(rows, phi, torch.ones(40, dtype=torch.bool), 1.0)
    alone = torch.full((40, rows.y.shape[1]), 7.0).double()
    found = models._without_parts(rows, phi, whole, penalty, alone)
    assert bool((found[-8:] == 7.0).all())
    for k in (0, 3):
        without = refitted(rows, phi, part != k, 1.0)
        tolerance = 1e-6 if link == "mean" else 0.02
        own = part == k
        torch.testing.assert_close(found[own], phi[own] @ without, atol=tolerance, rtol=0)


@pytest.mark.parametrize("link", ["logit", "log", "softmax"])
def test_newtons_method_finds_the_maximum(link: str) -> None:
    rows = some_rows(link)
    phi = models._with_one(rows.x)
    coefficients, _, penalties = models._newton(rows, phi)
    for found, penalty in zip(coefficients, penalties, strict=True):
        by_scipy = refitted(rows, phi, torch.ones(40, dtype=torch.bool), float(penalty))
        torch.testing.assert_close(phi @ found, phi @ by_scipy, atol=0.02, rtol=0)


def test_neighbours_and_trees_do_not_see_the_part_they_predict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Targets of one part that change leave its own predictions as they are, not those of the
    others."""
    part = torch.arange(N) % 4
    rows = some_rows("mean", N, 1, part)
    rows = rows._replace(y=4 * rows.x[:, :1])
    other = rows._replace(y=torch.where(part[:, None] == 0, 0.9 * rows.y, rows.y))
    monkeypatch.setattr(models, "_NEIGHBOURS", (3,))
    monkeypatch.setattr(models, "_TREES", 1)
    fits: tuple[Callable[[models._Rows, int], models._Model | None], ...]
    fits = (models._nearest_neighbours, models._boosted_trees)
    for fit in fits:
        one, two = fit(rows, 0), fit(other, 0)
        assert one is not None and two is not None
        own = part == 0
        assert torch.equal(one.held_out[own], two.held_out[own])
        assert not torch.equal(one.held_out[~own], two.held_out[~own])


def curve(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Likelihood]:
    x = 6 * torch.rand(n, 1, generator=g) - 3
    return x, torch.cos(3 * x[:, 0]) + 0.1 * torch.randn(n, generator=g), NUMBERS


def plane(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Likelihood]:
    x = torch.randn(n, 4, generator=g)
    return x, 100 + 5 * x[:, 0] + torch.randn(n, generator=g), NUMBERS


def step(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Likelihood]:
    x = torch.rand(n, 3, generator=g)
    return x, (x[:, 1] > 0.5).float() + 0.1 * torch.randn(n, generator=g), NUMBERS


def labels(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Likelihood]:
    x = torch.randn(n, 3, generator=g)
    yes = torch.rand(n, generator=g) < torch.sigmoid(2 * x[:, 0])
    return x, yes.float()[:, None], doxa.Bernoulli()


def kinds(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Likelihood]:
    x = torch.randn(n, 3, generator=g)
    gumbel = -torch.rand(n, 3, generator=g).log().neg().log()
    return x, (2 * x + gumbel).argmax(1), doxa.Categorical()


def counts(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Likelihood]:
    x = torch.randn(n, 3, generator=g)
    return x, torch.poisson((0.7 * x[:, 0] + 1).exp(), generator=g), doxa.Poisson()


def truth_of(table: Callable[..., object], x: Tensor, y: Tensor) -> float:
    """The mean log density of y under the distribution it was drawn from."""
    x, y = x.double(), y.double()
    if table is curve:
        scores = stats.norm.logpdf(y, torch.cos(3 * x[:, 0]), 0.1)
    elif table is plane:
        scores = stats.norm.logpdf(y, 100 + 5 * x[:, 0], 1.0)
    elif table is step:
        scores = stats.norm.logpdf(y, (x[:, 1] > 0.5).double(), 0.1)
    elif table is labels:
        scores = stats.bernoulli.logpmf(y[:, 0], torch.sigmoid(2 * x[:, 0]))
    elif table is counts:
        scores = stats.poisson.logpmf(y, (0.7 * x[:, 0] + 1).exp())
    else:
        scores = (2 * x).log_softmax(1).gather(1, y.long()[:, None]).numpy()
    return float(scores.mean())


@pytest.mark.parametrize(
    ("table", "best", "within"),
    [
        (curve, "gp", 0.15), (plane, "linear", 0.05), (step, "boosted-trees", 0.5),
        (labels, "linear", 0.03), (kinds, "linear", 0.05), (counts, "linear", 0.05),
    ],
)  # fmt: skip
def test_a_function_that_suits_a_yardstick_is_learned(
    table: Callable[[int, torch.Generator], tuple[Tensor, Tensor, Likelihood]], best: str,
    within: float,
) -> None:  # fmt: skip
    """The score on 4,000 new rows, against that of the distribution they were drawn from; and the
    held-out score of the rows themselves is near it."""
    g = rng(7)
    x, y, likelihood = table(300, g)
    new_x, new_y, _ = table(4000, g)
    found = by_name(yardsticks(x, y, likelihood))
    true = truth_of(table, new_x, new_y)
    score = float(found[best].log_prob(new_x, new_y).mean())
    assert true - within < score < true + 0.03
    constant = float(found["constant"].log_prob(new_x, new_y).mean())
    assert constant < score - 0.1
    held_out = found[best].held_out
    error = float(held_out.std()) / math.sqrt(300)
    assert abs(float(held_out.mean()) - found[best].optimism - score) < 4 * error + 0.05


def test_densities_integrate_to_one_and_are_in_units_of_y() -> None:
    g = rng(2)
    x, y, likelihood = plane(100, g)
    grid = torch.linspace(60, 140, 8001).double()
    for each, scaled in zip(
        yardsticks(x, y, likelihood), yardsticks(x, 1000 * y, likelihood), strict=True
    ):
        density = each.log_prob(x[:1].expand(len(grid), 4), grid).exp()
        assert float(torch.trapezoid(density, grid)) == pytest.approx(1.0, abs=1e-3)
        one, two = each.log_prob(x, y), scaled.log_prob(x, 1000 * y)
        torch.testing.assert_close(two, one - math.log(1000), atol=1e-3, rtol=0)


def test_heavy_tails_are_used_only_where_the_fit_may_use_them() -> None:
    g = rng(3)
    x = torch.randn(400, 2, generator=g)
    scale = (torch.randn(3, 400, generator=g).square().sum(0) / 3).sqrt()
    y = x[:, 0] + torch.randn(400, generator=g) / scale
    free = by_name(yardsticks(x, y, NUMBERS))["linear"]
    given = by_name(yardsticks(x, y, doxa.Gaussian()))["linear"]
    assert isinstance(free.likelihood, doxa.StudentT) and type(given.likelihood) is doxa.Gaussian
    fixed = by_name(yardsticks(x, y, doxa.Gaussian(noise=0.5)))["linear"]
    at_mean = fixed.log_prob(
        x[:1], fixed.location(x[:1].double())[0] * y.std(correction=0) + y.mean()
    )
    assert float(at_mean) == pytest.approx(-math.log(0.5 * math.sqrt(2 * math.pi)), abs=1e-3)


def test_rows_of_negligible_weight_do_not_matter() -> None:
    x, y, likelihood = plane(120, rng(4))
    weight = torch.ones(120)
    y[60:] += 50.0
    weight[60:] = 1e-9
    weighted = by_name(yardsticks(x, y, likelihood, weight))
    alone = by_name(yardsticks(x[:60], y[:60], likelihood))
    for name in ("constant", "linear"):
        one, two = (found[name].log_prob(x[:60], y[:60]) for found in (weighted, alone))
        torch.testing.assert_close(one, two, atol=1e-3, rtol=0)


def test_the_same_rows_give_the_same_bits() -> None:
    x, y, likelihood = curve(150, rng(5))
    one, two = (yardsticks(x, y, likelihood, seed=3) for _ in range(2))
    assert [each.name for each in one] == list(models._MODELS)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.held_out, b.held_out)
        assert torch.equal(a.log_prob(x, y), b.log_prob(x, y))


def test_columns_that_are_constant_or_repeated_do_no_harm() -> None:
    x, y, likelihood = plane(80, rng(6))
    more = torch.cat([x, x[:, :1], torch.full((80, 1), 1e6)], 1)
    found = by_name(yardsticks(more, y, likelihood))
    plain = by_name(yardsticks(x, y, likelihood))
    assert set(found) == set(models._MODELS)
    gap = found["linear"].held_out.mean() - plain["linear"].held_out.mean()
    assert abs(float(gap)) < 0.02


@pytest.mark.parametrize(
    ("x", "y", "likelihood", "why"),
    [
        (torch.zeros(9, 1, 3, 3), torch.zeros(9), NUMBERS, "not a table"),
        (torch.zeros(9, 3, dtype=torch.long), torch.zeros(9), NUMBERS, "not a table"),
        ({"a": torch.zeros(9, 3)}, torch.zeros(9), NUMBERS, "not a table"),
        (torch.zeros(9, 600), torch.zeros(9), NUMBERS, "columns"),
        (torch.zeros(9, 3), torch.zeros(9, 2, 2), NUMBERS, "targets"),
        (torch.zeros(9, 3), torch.zeros(9, 20), NUMBERS, "outputs"),
        (torch.zeros(9, 3), torch.ones(9).long(), doxa.Categorical(class_weight=(1.0, 2.0)),
         "likelihood"),
        (torch.zeros(9, 3), torch.ones(9).long(), doxa.Categorical(ignore_index=0), "likelihood"),
    ],
)  # fmt: skip
def test_what_has_no_yardsticks_is_refused_with_the_reason(
    x: object, y: Tensor, likelihood: Likelihood, why: str
) -> None:
    assert why in why_untested(x, y, likelihood)
    with pytest.raises(Unavailable, match=why):
        yardsticks(x, y, likelihood)
