"""The status "underfit": what simple models of the same rows say of a fit."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.driver import finish
from doxa.posterior import MixturePosterior, Status

N = 200


def curve(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(n, 1, generator=g) - 3
    return x, torch.cos(3 * x[:, 0]) + 0.5 * x[:, 0] + 0.1 * torch.randn(n, generator=g)


def plane(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=g)
    return x, x[:, 0] + 0.5 * torch.randn(n, generator=g)


def fitted(data: Any, method: str = "deep-ensemble", net: Any = None, **options: Any) -> Any:
    net = net or nn.Linear(data[0].shape[1], 1)
    options = {"steps": 400, "progress": False, **options}
    return doxa.fit(net, data, method, **options)


@pytest.mark.parametrize("method", ["deep-ensemble", "map"])
def test_a_curve_that_a_line_cannot_learn_is_underfit(method: str) -> None:
    """The errors of the line are those of cos 3x, near √½; those of the curve .1. So the gain is
    near log(√½/.1) = 1.96 nats. The constant has the variance of x/2, ¾, in addition."""
    posterior = fitted(curve(), method)
    found = posterior.diagnostics["yardsticks"]
    assert posterior.status == "underfit"
    assert found["tested"] and found["best"] == "gp" and posterior.diagnostics.yardsticks is found
    assert found["gp"] == pytest.approx(math.log(math.sqrt(0.5) / 0.1), abs=0.35)
    assert abs(found["linear"]) < 0.1
    assert found["constant"] == pytest.approx(-0.5 * math.log((0.5 + 0.75) / 0.5), abs=0.15)
    reason = posterior.status.reason
    assert "Gaussian process" in reason and 'method "gp"' in reason
    assert f"{found['gp']:.2g} nats per row" in reason


def test_a_line_that_is_learned_is_ok() -> None:
    posterior = fitted(plane())
    found = posterior.diagnostics["yardsticks"]
    assert posterior.status == "ok" and found["tested"]
    assert found["linear"] == pytest.approx(0.0, abs=0.08)
    assert found["constant"] < -0.5 and found["rows"] == found["trained"] / 2 == N / 2


def test_training_rows_are_used_where_one_part_is_held_out() -> None:
    """20 of 200 rows are held out: fewer than 30."""
    found = fitted(plane(), "map").diagnostics["yardsticks"]
    assert found["tested"] and found["rows"] == N


def test_large_tables_are_sampled() -> None:
    found = fitted(plane(3000), validation=0.5, members=2).diagnostics["yardsticks"]
    assert found["trained"] == 500 and found["rows"] == 250


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_other_targets_are_compared(likelihood: str) -> None:
    """Labels and counts of which x says everything, and a network that ignores x."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(300, 1, generator=g)
    y = (x > 0).float() if likelihood == "bernoulli" else torch.poisson((2 * x).exp(), generator=g)

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return 0 * x + self.shift

    posterior = fitted((x, y), net=Constant(), init="given", likelihood=likelihood)
    found = posterior.diagnostics["yardsticks"]
    assert posterior.status == "underfit" and found[found["best"]] > 0.4


@pytest.mark.slow
def test_what_is_not_compared_says_why() -> None:
    g = torch.Generator().manual_seed(3)
    few = fitted(plane(24)).diagnostics["yardsticks"]
    assert few == {"tested": False, "why": "24 rows are too few: 30 are needed"}
    image = torch.randn(100, 1, 2, 2, generator=g), torch.randn(100, generator=g)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    assert "not a table" in fitted(image, net=net).diagnostics["yardsticks"]["why"]
    x, y = plane(60)
    weight = torch.cat([torch.ones(20), torch.full((40,), 0.001)])
    assert "too few" in fitted((x, y), sample_weight=weight).diagnostics["yardsticks"]["why"]
    sweep = fitted(plane(60), runs=doxa.Runs(seeds=range(5)), steps=20)
    assert "more than 4 runs" in sweep[0].diagnostics["yardsticks"]["why"]
    assert "yardsticks" not in fitted((x, y), validation=None).diagnostics
    assert "yardsticks" not in doxa.fit(None, (x, y), "linear").diagnostics


def test_a_cross_fitted_network_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted(curve(45), "map")
    assert found.diagnostics["held_out"]["cross_fit_parts"] == 5
    assert found.diagnostics["yardsticks"]["rows"] == 45 and found.status == "underfit"


def test_rows_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score of a fit whose network is the true function is that of a yardstick which is the
    true function, row by row: nothing is gained, with no error."""
    x, y = plane()
    seen: list[tuple[Any, Any]] = []
    compare = finish.compare_with_yardsticks

    def noted(posterior: Any, scores: Any, run: Any) -> None:
        seen.append((scores, run))
        compare(posterior, scores, run)

    monkeypatch.setattr(finish, "compare_with_yardsticks", noted)
    found = fitted((x, y)).diagnostics["yardsticks"]
    (scores, run) = seen[0]
    held = torch.cat([run.rows.validation[split] for split in scores])
    score = torch.cat(list(scores.values()))
    by_hand = torch.distributions.Normal(x[held, 0], 0.5).log_prob(y[held]) - score
    assert found["error"] < 0.5 * float(score.std()) / math.sqrt(len(score))
    assert float(by_hand.mean()) == pytest.approx(found["linear"], abs=0.08)


def test_the_order_of_statuses() -> None:
    named = ("diverged", "prior-collapse", "worse-than-constant", "overconfident", "underfit",
             "underconfident")  # fmt: skip
    for first, second in pairwise(named):
        one, two = Status(first, "a"), Status(second, "b")
        assert one.or_before(two) is one and two.or_before(one) is one
    assert Status("plug-in").or_before(Status("underfit")) == "plug-in"
    assert Status("ok").or_before(Status("not-evaluated")) == "not-evaluated"
    again = Status("ok", "first")
    assert again.or_before(Status("ok", "second")) is again


def test_a_mixture_has_the_first_status_of_its_parts() -> None:
    parts = [fitted(plane(60), "map", steps=5) for _ in range(2)]
    parts[0].record.status, parts[1].record.status = Status("underfit"), Status("diverged")
    assert MixturePosterior(parts, [1, 1]).status == "diverged"
