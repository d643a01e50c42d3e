"""What held-out rows say of a fit is part of its status."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.diagnose import diagnose as doctor
from doxa.driver import finish
from doxa.driver.validation import evaluate_rows
from doxa.posterior import Status

N = 300


def line(spread: float, n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=g)
    return x, x[:, 0] + spread * torch.randn(n, generator=g)


def fitted(data: tuple[Tensor, Tensor], method: str = "map", **options: object) -> doxa.Posterior:
    net = doxa.nets.mlp(3, int(options.pop("outputs", 1)), (8,))  # type: ignore[call-overload]
    posterior: doxa.Posterior = doxa.fit(
        net, data, method, steps=300, progress=False, **options  # type: ignore[arg-type]
    )  # fmt: skip
    return posterior


def test_a_good_fit_is_ok_and_says_how_good() -> None:
    posterior = fitted(line(0.3), "deep-ensemble")
    found = posterior.diagnostics["held_out"]
    assert posterior.status == "ok"
    assert found["coverage"] == pytest.approx(0.9, abs=0.08) and found["gain"] > 0.5
    assert posterior.validation == pytest.approx(found["log_prob"])


def test_intervals_that_are_too_narrow_are_said() -> None:
    """The noise is given, half of what it is: 90 % intervals hold 59 %."""
    posterior = fitted(line(0.3), likelihood=doxa.Gaussian(0.15))
    assert posterior.status == "overconfident"
    assert "90% intervals contain" in posterior.status.reason
    assert posterior.diagnostics["held_out"]["coverage"] < 0.7


def test_worse_than_a_constant_is_said() -> None:
    x, y = line(0.3)
    posterior = fitted((1e5 * x, y), lr=1e-4)
    assert posterior.status in ("worse-than-constant", "diverged"), posterior.diagnostics
    assert posterior.status.reason


def test_data_that_hold_nothing_to_learn_are_no_failure() -> None:
    g = torch.Generator().manual_seed(3)
    data = torch.randn(N, 3, generator=g), torch.randn(N, generator=g)
    assert fitted(data, "deep-ensemble").status == "ok"


def test_the_units_are_those_of_y() -> None:
    x, y = line(0.3)
    plain = fitted((x, y), standardize=True).diagnostics["held_out"]
    large = fitted((x, 1000 * y + 50), standardize=True).diagnostics["held_out"]
    assert large["coverage"] == pytest.approx(plain["coverage"], abs=0.05)
    assert large["log_prob"] == pytest.approx(plain["log_prob"] - math.log(1000), abs=0.05)
    assert large["gain"] == pytest.approx(plain["gain"], abs=0.05)


def test_classes_that_are_too_sure_are_said() -> None:
    """Labels of which three in ten are wrong, and a network that gives them no doubt."""
    g = torch.Generator().manual_seed(4)
    x = torch.randn(N, 3, generator=g)
    label = ((x[:, 0] > 0) ^ (torch.rand(N, generator=g) < 0.3)).long()
    fair = fitted((x, label), likelihood="categorical", outputs=2)
    assert fair.status == "ok" and "too_sure" in fair.diagnostics["held_out"]

    class Sure(torch.nn.Module):
        """The right direction, and far too sure of it."""

        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([-20 * x[:, 0], 20 * x[:, 0]], 1) + self.shift

    sure = doxa.fit(
        Sure(), (x, label), "map", likelihood="categorical", init="given", steps=2, progress=False
    )
    assert sure.status in ("overconfident", "worse-than-constant") and sure.status.reason


@pytest.mark.parametrize(("slope", "said"), [(0.125, "underconfident"), (1.0, "ok")])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_classes_that_are_much_too_unsure_are_said(
    likelihood: str, slope: float, said: str
) -> None:
    """Labels drawn with log-odds 8 x, and a network that says an eighth of them, or them. With the
    sigmoid s of a logit z, 2 z gains log s − log(s² + (1 − s)²) of the probability of y. The inputs
    are no table: of a table, simple models would find that the fit is worse ("underfit")."""
    g = torch.Generator().manual_seed(4)
    x = torch.randn(600, 1, generator=g)
    y = (torch.rand(600, generator=g) < torch.sigmoid(8 * x[:, 0])).long()
    image = x[:, :, None]

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            z = slope * 8 * x[:, :, 0] + 1e-9 * self.shift
            return z if likelihood == "bernoulli" else torch.cat([torch.zeros_like(z), z], 1)

    # a temperature that is given: else the rows held out would mend it
    family = {"categorical": doxa.Categorical, "bernoulli": doxa.Bernoulli}[likelihood]
    target = y.float()[:, None] if likelihood == "bernoulli" else y
    posterior = doxa.fit(
        Fixed(), (image, target), "map", likelihood=family(temperature=1.0), init="given", steps=1,
        progress=False, validation=(image, target),
    )  # fmt: skip
    assert posterior.status == said, posterior.status.reason
    s = torch.sigmoid(slope * 8 * (2 * y - 1) * x[:, 0]).double()
    gained = (s.log() - (s**2 + (1 - s) ** 2).log()).mean()
    told = posterior.diagnostics["held_out"]["twice_as_sure"]
    assert told == pytest.approx(float(gained), abs=0.02)  # one row more, that is wrong


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "categorical"])
def test_the_constant_is_the_best_for_what_was_seen(likelihood: str) -> None:
    g = torch.Generator().manual_seed(5)
    family = doxa.likelihoods.likelihood(likelihood)
    if likelihood == "gaussian":
        seen, y = torch.randn(40, 1, generator=g).double(), torch.tensor([[0.5], [3.0]]).double()
        normal = torch.distributions.Normal(seen.mean(), seen.std(correction=0))
        expected = normal.log_prob(y)[:, 0]
    elif likelihood == "bernoulli":
        seen, y = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])[:, None], torch.tensor([[1.0], [0.0]])
        expected = torch.tensor([4 / 10, 6 / 10]).double().log()
    else:
        seen, y = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 2])
        expected = torch.tensor([4 / 8, 2 / 8]).double().log()
    found = family.constant(seen, y)
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_pixels_that_are_ignored_count_nothing() -> None:
    family = doxa.Categorical(ignore_index=9)
    seen = torch.tensor([[0, 1], [0, 9]])
    found = family.constant(seen, torch.tensor([[0, 9], [9, 9]]))
    torch.testing.assert_close(found, torch.tensor([math.log(3 / 5), 0.0]).double())


def test_pixels_that_are_ignored_are_never_wrong() -> None:
    """A map of which nine pixels in ten have no label, and the others are easy."""
    g = torch.Generator().manual_seed(6)
    x = torch.randn(100, 1, 5, 5, generator=g)
    y = (x[:, 0] > 0).long()
    y[torch.rand(y.shape, generator=g) < 0.9] = 9
    net = torch.nn.Conv2d(1, 2, 1)
    posterior = doxa.fit(
        net, (x, y), "map", likelihood=doxa.Categorical(ignore_index=9), steps=200, lr=0.1,
        progress=False,
    )  # fmt: skip
    assert posterior.status == "ok", posterior.status.reason
    assert posterior.diagnostics["held_out"]["too_sure"] < 0.05


def test_rows_of_weight_zero_judge_nothing() -> None:
    x, y = line(0.3)
    wild, weight = y.clone(), torch.ones(N)
    wild[::4], weight[::4] = 1e5, 0.0
    posterior = fitted((x, wild), sample_weight=weight, standardize=True)
    assert posterior.status == "ok", posterior.status.reason
    assert posterior.diagnostics["held_out"]["log_prob"] > -1.0


def flat_table(rows: int = 20, columns: int = 600) -> tuple[Tensor, Tensor]:
    """Rows that say next to nothing of the weights: their posterior is the prior."""
    g = torch.Generator().manual_seed(0)
    return 1e-3 * torch.randn(rows, columns, generator=g), torch.randn(rows, 1, generator=g)


@pytest.mark.parametrize(("step", "status"), [(0.5, "ok"), (1.6, "diverged")])
def test_a_chain_rises_from_the_mode_to_where_the_mass_is(step: float, status: str) -> None:
    """600 weights start near the maximum of N(0, 1): draws lie 300 nats below it, 15 a row of 20.
    Langevin with step η has 1/(1 − η/2) times the variance: 5 times at η = 1.6."""
    method = doxa.SGLD(draws=200, burn_in=50, thin=1, step_size=step, decay=0)
    net, noise = nn.Linear(600, 1, bias=False), doxa.Gaussian(1.0)
    posterior = doxa.fit(net, flat_table(), method, likelihood=noise, members=2, progress=False)
    losses = posterior.history["loss"]
    assert losses[-1][1][0] > losses[0][1][0] + 10
    assert posterior.status == status, posterior.status.reason


@pytest.mark.parametrize("rate", [1e-9, 0.1])
def test_a_q_that_stays_at_its_prior_has_learned_nothing(rate: float) -> None:
    """Without rows held out: y is five times x, and q is N(0, 1) on a weight of 0, or trained."""
    x, _ = line(0.3)
    net = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(net.weight)
    posterior = doxa.fit(
        doxa.Model(net, doxa.Gaussian(2.0), doxa.Normal(1.0)), (x, 5 * x[:, 0]),
        doxa.MeanField(initial_std=1.0), init="given", steps=300, lr=rate, validation=None,
        progress=False,
    )  # fmt: skip
    assert posterior.status == ("ok" if rate > 1e-3 else "prior-collapse"), posterior.status.reason


def test_a_rise_of_the_loss_is_not_that_of_the_state_that_was_kept() -> None:
    """Held-out rows keep the best state: a spike of the loss after it says nothing of the fit."""
    seen = {"loss": [[1, [4.6]], [300, [0.6]], [600, [12.3]]]}
    looks = {"validation": [[310, [-1.0]], [620, [-9.0]]]}
    for history, said in ((seen, "diverged"), (seen | looks, "ok")):
        record = SimpleNamespace(history=history, status=Status())
        given: list[Any] = [SimpleNamespace(record=record), None]
        result: Any = SimpleNamespace(diverged={}, kept=None, stopped="")
        finish._check_divergence(*given, result, slice(0, 1))
        assert record.status == said


def given(std: float, n: int = 400, seed: int = 0) -> tuple[Any, Any, Any]:
    """A posterior that knows the mean 2x and assumes noise of this scale, with rows of noise 1."""
    x = torch.randn(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = 2 * x + torch.randn(n, 1, generator=torch.Generator().manual_seed(seed + 1)).double()
    known = torch.linspace(-3, 3, 200, dtype=torch.float64)[:, None]
    posterior = doxa.fit(
        None, (known, 2 * known), doxa.BayesianLinear(), likelihood=doxa.Gaussian(noise=std)
    )
    return posterior, x, y


@pytest.mark.parametrize(
    ("std", "status"), [(1.0, "ok"), (0.5, "overconfident"), (0.05, "worse-than-constant")]
)
def test_new_rows_change_the_status_of_a_posterior(std: float, status: str, tmp_path: Path) -> None:
    """The coverage of 90 % intervals is 2Φ(1.645 s) − 1: .59 for s = 1/2. The density of new rows
    is below that of a constant by far for s = 1/20. For s = 1 a coverage below .82 has a
    probability below 1e-6."""
    posterior, x, y = given(std)
    assert posterior.status == "ok"
    assert evaluate_rows(posterior, x, y, "rows of --test new.csv", y) == status
    assert posterior.status == status
    if status != "ok":
        assert "400 rows of --test new.csv" in posterior.status.reason
    posterior.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run")
    assert (loaded.status, loaded.status.reason) == (status, posterior.status.reason)


def test_few_new_rows_and_other_statuses_change_nothing() -> None:
    posterior, x, y = given(0.05)
    assert evaluate_rows(posterior, x[:11], y[:11], seen=y) == "ok"
    posterior.record.status = Status("not-evaluated", "no rows")
    assert evaluate_rows(posterior, x[:12], y[:12], seen=y) == "worse-than-constant"
    posterior.record.status = Status("diverged", "why")
    assert evaluate_rows(posterior, x, y, seen=y) == "diverged"
    good, x, y = given(1.0)
    good.record.status = Status("not-evaluated", "no rows")
    assert evaluate_rows(good, x, y, seen=y) == "ok"


def test_a_recalibrated_posterior_is_evaluated_as_it_predicts() -> None:
    """The status of the posterior before the recalibration stays."""
    posterior, x, y = given(0.5, 800)
    assert evaluate_rows(posterior, x, y) == "overconfident"
    better = doxa.evaluate.recalibrate(posterior, (x[:400], y[:400]), "quantile")
    assert evaluate_rows(better, x[400:], y[400:]) == "ok"
    assert posterior.status == "overconfident"
    wide = doxa.evaluate.conformal(posterior, (x[:400], y[:400]), 0.8)
    assert evaluate_rows(wide, x[400:], y[400:]) == "ok"  # at its own level


def test_the_diagnosis_and_the_status_agree() -> None:
    posterior, x, y = given(0.5)
    found = doctor(posterior, (x, y), (x + 0, y))
    assert posterior.status == "overconfident"
    assert found["status"].alarms and "400 test rows" in found["status"].words
    assert not found.ok


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "poisson"])
def test_new_rows_of_classes_and_counts(likelihood: str) -> None:
    """Logits ten times too large for two classes; counts have a constant to compare with."""
    source = torch.Generator().manual_seed(3)
    n, scale = 600, {"poisson": 1.0}.get(likelihood, 10.0)
    x = torch.randn(n, 1, generator=source)
    if likelihood == "poisson":
        y = torch.poisson(x[:, 0].exp(), generator=source)
        f = x
    else:
        y = (torch.rand(n, generator=source) < x[:, 0].sigmoid()).long()
        f = torch.cat([torch.zeros(n, 1), x], 1) if likelihood == "categorical" else x
    net = torch.nn.Linear(1, f.shape[1])
    with torch.no_grad():
        net.bias.zero_()
        net.weight[:] = 0.0
        net.weight[-1] = scale
    posterior = doxa.fit(
        net, (x, y), "map", likelihood=likelihood, init="given", steps=1, lr=1e-12, validation=None
    )
    expected = "ok" if likelihood == "poisson" else "worse-than-constant"
    assert evaluate_rows(posterior, x, y, seen=y) == expected
    if likelihood != "poisson":
        posterior.record.status = Status()
        assert evaluate_rows(posterior, x, y) == "overconfident"
