"""Probabilities of Gaussian logits by their log odds: against quadrature and many draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa import evaluate
from doxa.driver.validation import moved
from doxa.likelihoods import Bernoulli, Categorical
from doxa.predictive.classes import Odds, averaged, integral, log_odds
from doxa.predictive.mixture import Mixture, build


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits(rows: int, classes: int, width: float) -> tuple[Tensor, Tensor]:
    """Means [N, C] and roots [N, C, C] of Gaussians over logits, correlated, of unequal widths."""
    root = width * normal(rows, classes, classes, seed=1) / classes**0.5
    return 2 * width * normal(rows, classes, seed=2), root


def drawn(mean: Tensor, root: Tensor, count: int, seed: int = 3) -> Tensor:
    return mean + torch.einsum("nij,snj->sni", root, normal(count, *mean.shape, seed=seed))


def odds_of(f: Tensor, mean: Tensor, likelihood: Any = None) -> Odds:
    likelihood = likelihood or Categorical()
    form = averaged(build(f, likelihood, None, None, None, 0, 1), likelihood, mean[None], [len(f)])
    assert isinstance(form, Odds)
    return form


def divergence(exact: Tensor, p: Tensor) -> float:
    return float((exact * (exact.log() - p.log())).sum(1).mean())


def test_the_integral_is_that_of_quadrature() -> None:
    """E σ(l) of both classes of one logit, at means up to 60 and standard deviations up to 20 (40);
    20,001 nodes on the other side. Far out it is the logarithm that has to be right."""
    m = torch.linspace(-60, 60, 25).double()[:, None]
    v = torch.tensor([0.0, 0.25, 4.0, 100.0, 400.0, 1600.0]).double()
    t = torch.linspace(-9, 9, 20_001).double()
    weight = torch.softmax(-0.5 * t.square(), 0).log()
    f = m[..., None] + v.sqrt()[:, None] * t
    exact = torch.logsumexp(nn.functional.logsigmoid(f) + weight, -1)
    mean, variance = torch.stack([-m.expand(25, 6), m.expand(25, 6)], 1), v.expand(25, 2, 6)
    ours = integral(mean, variance)[:, 1]
    error = (ours.exp() - exact.exp()).abs().amax(0)
    assert error[:5].max() < 5e-5 and error[5] < 2e-3
    assert (ours - exact)[exact > -20.0].abs().max() < 0.01


def test_log_odds_are_those_of_a_softmax_and_do_not_overflow() -> None:
    f = 3 * normal(7, 5, 4)
    p = f.softmax(2)
    assert torch.allclose(log_odds(f, Categorical()), p.log() - torch.log1p(-p), atol=1e-10)
    wide = torch.tensor([[[1000.0, 0.0, -5.0]]]).double()
    against = torch.logsumexp(torch.tensor([0.0, -5.0]).double(), 0)
    expected = torch.tensor([1000.0 - float(against), -1000.0, -1005.0]).double()
    assert torch.allclose(log_odds(wide, Categorical())[0, 0], expected)
    one = normal(7, 5)
    assert torch.equal(log_odds(one, Bernoulli()), torch.stack([-one, one], 2))


def test_two_classes_know_their_mean() -> None:
    """Their log odds are Gaussian about a mean that is known: 50 draws whose average is off leave
    the probability at a half. (Plain averages, and draws that are not moved, do not.)"""
    root = torch.tensor([[[4.0, 0.0], [0.0, 3.0]]]).double()
    mean = torch.zeros(1, 2).double()
    f = drawn(mean, root, 50)
    assert abs(float(f.softmax(2).mean(0)[0, 0]) - 0.5) > 0.01
    assert torch.allclose(odds_of(f, mean).mean, torch.full((1, 2), 0.5).double(), atol=1e-12)


@pytest.mark.parametrize(("classes", "width"), [(2, 3.0), (3, 8.0), (10, 2.0), (10, 12.0)])
def test_it_is_nearer_to_the_integral_than_the_average_of_the_same_draws(
    classes: int, width: float
) -> None:
    """The mean Kullback–Leibler divergence from the average over 40,000 draws to what a hundred
    give is below half of theirs (measured: 0.07 to 0.4), and so is that of the squared error to a
    tenth more than theirs (0.2 to 0.8)."""
    mean, root = logits(60, classes, width)
    exact = sum(drawn(mean, root, 4000, seed=s).softmax(2).mean(0) for s in range(10, 20)) / 10
    f = drawn(mean, root, 100)
    plain, ours = f.softmax(2).mean(0), odds_of(f, mean).mean
    exact = exact.clamp_min(1e-12)
    assert divergence(exact, ours) < 0.5 * divergence(exact, plain)
    assert (ours - exact).square().mean() < 1.1 * (plain - exact).square().mean()


def test_a_class_that_one_function_in_ten_thousand_votes_for_has_its_probability() -> None:
    """Two logits 52.6 apart, with a standard deviation of 10 each: Φ(−52.6/√200) is 1e-4. A hundred
    draws do not see it, and give it some nats less."""
    mean = torch.tensor([[0.0, -52.6]]).double()
    root = 10 * torch.eye(2).double()[None]
    y = torch.tensor([1])
    nodes = torch.linspace(-9, 9, 20_001).double()
    weight = torch.softmax(-0.5 * nodes.square(), 0)
    exact = float((torch.sigmoid(-52.6 + 200**0.5 * nodes) * weight).sum().log())
    assert -9.2 < exact < -9.0
    found = [
        float(odds_of(drawn(mean, root, 100, seed=s), mean).log_prob(y)) - exact for s in range(40)
    ]
    plain = [
        float(drawn(mean, root, 100, seed=s).log_softmax(2)[:, 0, 1].logsumexp(0) - np.log(100))
        - exact
        for s in range(40)
    ]
    assert np.abs(found).mean() < 1.0 and np.abs(found).max() < 4.0
    assert np.mean(plain) < -2.0


def test_few_draws_are_averaged() -> None:
    mean, root = logits(4, 3, 2.0)
    f = drawn(mean, root, 9)
    form = build(f, Categorical(), None, None, None, 0, 1)
    assert averaged(form, Categorical(), mean[None], [9]) is form


def test_members_are_mixed_by_their_draws() -> None:
    """30 draws of one Gaussian and 10 of another: three quarters and a quarter."""
    mean, root = logits(4, 3, 2.0)
    a, b = drawn(mean, root, 30), drawn(-mean, root, 10, seed=5)
    form = build(torch.cat([a, b]), Categorical(), None, None, None, 0, 1)
    both = averaged(form, Categorical(), torch.stack([mean, -mean]), [30, 10])
    own = 0.75 * odds_of(a, mean).mean + 0.25 * odds_of(b, -mean).mean
    assert torch.allclose(both.mean, own, atol=1e-12)


def test_the_parts_add_up_and_draws_are_kept() -> None:
    mean, root = logits(20, 4, 5.0)
    f = drawn(mean, root, 50)
    p = odds_of(f, mean)
    assert torch.equal(p.samples, f)
    assert torch.allclose(p.mean.sum(1), torch.ones(20).double())
    assert torch.allclose(p.variance, p.mean * (1 - p.mean))
    assert bool((p.mutual_information >= 0).all() & (p.mutual_information <= p.entropy).all())
    y = torch.arange(20) % 4
    assert torch.allclose(p.log_prob(y), p.mean.gather(1, y[:, None])[:, 0].log())


def test_draws_of_y_have_the_probabilities_and_functions_stay_together() -> None:
    """40,000 draws: each row's shares within seven standard errors of its own probabilities, which
    differ from the draws' average by more. Two rows that are one and the same still agree more
    often than if each were drawn by itself."""
    mean, root = logits(3, 3, 6.0)
    mean, root = torch.cat([mean, mean[:1]]), torch.cat([root, root[:1]])
    eps = normal(50, 3, 3, seed=3)
    f = mean + torch.einsum("nij,snj->sni", root, torch.cat([eps, eps[:, :1]], 1))
    p = odds_of(f, mean)
    y = p.sample(40_000, seed=1)
    shares = torch.nn.functional.one_hot(y, 3).double().mean(0)
    error = (p.variance / 40_000).sqrt()
    assert bool(((shares - p.mean).abs() <= 7 * error + 1e-9).all())
    assert bool(((p.base.mean - p.mean).abs() > 7 * error).any())
    together = float((y[:, 0] == y[:, 3]).double().mean())
    assert together > 0.1 + float(p.mean[0].square().sum())


def test_a_temperature_and_ignored_labels_count() -> None:
    mean, root = logits(6, 3, 2.0)
    f = drawn(mean, root, 20)
    hot = odds_of(f, mean, Categorical(temperature=2.0))
    assert torch.allclose(hot.mean, odds_of(f / 2, mean / 2).mean)
    y = torch.tensor([0, 1, 2, -1, 0, 1])
    some = odds_of(f, mean, Categorical(ignore_index=-1))
    assert float(some.log_prob(some.targets(y))[3]) == 0.0
    assert bool((some.log_prob(some.targets(y))[:3] < 0).all())


def test_labels_of_one_row_are_not_independent() -> None:
    """Two sites with the same logits: both are right or wrong together, in the same functions. What
    each site has by itself is integrated."""
    mean, root = logits(5, 3, 4.0)
    f, y = drawn(mean, root, 100), torch.arange(5) % 3
    twice, both = torch.stack([f, f], 3), torch.stack([y, y], 1)
    p = odds_of(twice, torch.stack([mean, mean], 2))
    each = f.log_softmax(2).gather(2, y.expand(100, 5)[..., None])[..., 0]
    assert torch.allclose(p.log_prob(both), torch.logsumexp(2 * each, 0) - np.log(100))
    assert torch.allclose(p.mean[..., 0], odds_of(f, mean).mean)


def fitted(outputs: int, y: Tensor, likelihood: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    net = doxa.nets.mlp(2, outputs, (4,), activation="tanh").double()
    return doxa.fit(net, (normal(len(y), 2), y), doxa.Laplace(train=False, **settings),
                    likelihood=likelihood, init="given", seed=0)  # fmt: skip


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("structure", ["full", "kronecker", "functional"])
def test_laplace_has_it_by_default(structure: str, centre: bool, tmp_path: Path) -> None:
    """About f(θ*) + J(μ − θ*), by the functions that it draws; as moments, and saved, too."""
    posterior = fitted(
        3, torch.arange(30) % 3, "categorical", structure=structure, mean_correction=centre
    )
    x = normal(8, 2, seed=4)
    p = posterior.predict(x)
    params = {k: v[0] for k, v in posterior.layout.unflatten(posterior.maximum).items()}
    middle = posterior.network.forward(params, x)
    if posterior.moved is not None:
        middle = middle + posterior.jacobians().along(x, posterior.moved[:, None])[1][0, 0]
    odds = log_odds(p.samples - p.samples.mean(0) + middle, Categorical())
    by_hand = integral(odds.mean(0), odds.var(0)).exp()
    assert torch.allclose(p.probs, by_hand)
    assert not torch.allclose(p.probs, p.samples.softmax(2).mean(0), atol=1e-4)
    assert torch.equal(p.samples, posterior.functions(x, n=100))
    streamed = posterior.predict(x, keep="moments")
    for name in ("probs", "epistemic", "aleatoric", "entropy"):
        assert torch.allclose(getattr(streamed, name), getattr(p, name)), name
    posterior.save(tmp_path / "saved")
    assert torch.equal(doxa.load(tmp_path / "saved").predict(x).probs, p.probs)


def test_plain_averages_can_be_asked_for() -> None:
    posterior = fitted(3, torch.arange(30) % 3, "categorical", link="samples")
    p = posterior.predict(normal(8, 2, seed=4))
    assert torch.allclose(p.probs, p.samples.softmax(2).mean(0))


def test_one_logit_and_several_heads_have_it() -> None:
    y = (torch.arange(30) % 2).double()
    p = fitted(1, y, "bernoulli").predict(normal(8, 2, seed=4))
    assert isinstance(p.form, Odds) and p.probs.shape == (8,)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 4).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.layer(x)
            return out[:, :3], out[:, 3:]

    posterior = doxa.fit(
        Both(), (normal(30, 2), (torch.arange(30) % 3, normal(30, 1, seed=5))),
        doxa.Laplace(train=False), likelihood=("categorical", "gaussian"), init="given",
    )  # fmt: skip
    first, second = posterior.predict(normal(8, 2, seed=4)).form.heads
    assert isinstance(first, Odds) and not isinstance(second, Odds)


def test_rows_left_out_can_still_ask_for_a_temperature() -> None:
    posterior = fitted(3, torch.arange(30) % 3, "categorical")
    found = moved(posterior, posterior, normal(8, 2, seed=4))
    assert type(found) is Mixture


def test_recalibration_and_scores_see_the_same_probabilities() -> None:
    posterior = fitted(3, torch.arange(30) % 3, "categorical")
    x, y = normal(60, 2, seed=4), torch.arange(60) % 3
    p = posterior.predict(x)
    score = evaluate.metrics(p, y)["log_likelihood"]
    assert score == pytest.approx(float(p.log_prob(y).mean()), abs=1e-9)
    calibrated = evaluate.recalibrate(posterior, (x, y), "temperature").predict(x)
    t = float(evaluate.recalibrate(posterior, (x, y), "temperature").transform.temperature)
    assert torch.allclose(calibrated.probs, (p.probs.log() / t).softmax(1), atol=1e-6)
