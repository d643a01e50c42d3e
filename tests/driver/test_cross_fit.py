"""Few rows and one network: held-out parts stop, calibrate and evaluate; all rows are fitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.driver.setup import cross_fit_parts

Data = tuple[Tensor, Tensor]


def table(n: int, seed: int = 0, new: int = 2000) -> tuple[Data, Data]:
    """y = x₀ + ε/2 with six columns: n rows, and as many new ones as asked."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n + new, 6, generator=g)
    y = x[:, 0] + 0.5 * torch.randn(n + new, generator=g)
    return (x[:n], y[:n]), (x[n:], y[n:])


def fit(data: Data, method: Any = "map", **options: Any) -> Any:
    net = options.pop("net", None) or doxa.nets.mlp(6, options.pop("outputs", 1), (16,))
    return doxa.fit(net, data, method, **{"standardize": True, "progress": False, **options})


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([7], 0), ([8], 4), ([10], 5), ([49], 5), ([599], 10), ([600], 0), ([12, 600], 10)],
)
def test_when_it_is_done(sizes: list[float], count: int) -> None:
    assert cross_fit_parts(sizes) == count


@pytest.mark.parametrize(("size", "count"), [(49, 5), (50, 0), (599, 0)])
def test_a_large_network_is_fitted_several_times_only_if_it_must(size: int, count: int) -> None:
    assert cross_fit_parts([size], weights=20_001) == count


def test_the_chosen_alternative_is_fitted_to_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are those of a fit with its settings to all rows, up to the step that the parts
    have chosen; the parts scored all rows."""
    monkeypatch.setattr(doxa.MAP, "default_steps", 300)
    monkeypatch.setattr("doxa.driver.alternatives.ROUNDS", 1)
    g = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(100, 1, generator=g) - 3
    data = x, torch.cos(3 * x) + 0.1 * torch.randn(100, 1, generator=g)
    net = doxa.nets.mlp(1, 1, (50,))
    got = fit(data, net=net)
    found = got.diagnostics["alternatives"]
    assert found["chosen"] and got.model.prior == doxa.Normal(3.0)
    assert got.diagnostics["rows"] == got.diagnostics["held_out"]["rows"] == 100
    assert got.validation > found["validation_of_defaults"]
    want = fit(data, net=net, prior=doxa.Normal(3.0), lr=5 * doxa.MAP.default_rate, validation=None)
    assert got.diagnostics["steps"] == 300, "the best step is the last one, as in this fit"
    assert torch.equal(got.samples[..., :-1], want.samples[..., :-1])


def test_several_members_or_validation_written_out_have_none() -> None:
    data, _ = table(20)
    assert "cross_fit_parts" in fit(data, steps=20).diagnostics["held_out"]
    assert "cross_fit_parts" not in fit(data, steps=20, members=2).diagnostics["held_out"]
    assert "held_out" not in fit(data, steps=20, validation=None).diagnostics
    assert fit(data, steps=20, validation=0.2).diagnostics["held_out"]["rows"] == 4


def test_all_rows_are_fitted_up_to_the_chosen_step() -> None:
    """The weights are those of a fit to all rows that ends there; the noise is not."""
    (x, y), _ = table(30)
    got = fit((x, y), schedule="constant", steps=400)
    step = got.diagnostics["steps"]
    assert got.diagnostics["rows"] == 30 and got.diagnostics["held_out"]["rows"] == 30
    assert 0 < step < 400, "the held-out rows stopped the training"
    want = fit((x, y), schedule="constant", steps=step, validation=None)
    at = [i for i, n in enumerate(got.layout.names) if n.startswith("likelihood.")]
    assert len(at) == 1 and at[0] == len(got.layout.names) - 1
    assert torch.equal(got.samples[..., :-1], want.samples[..., :-1])
    assert float(got.samples[..., -1]) != float(want.samples[..., -1])


class Given(nn.Module):
    """Functions that training does not change: a slope, and a weight that does nothing."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.register_buffer("slope", torch.tensor(slope))
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        slope: Any = self.slope
        return slope * x[:, :1] + 0.0 * self.weight


@pytest.mark.parametrize("members", [1, 5])
def test_the_noise_is_that_of_all_held_out_rows(members: int) -> None:
    """σ² = Σ e²/(n − 2) of all rows, each held out once, but for what the prior N(0, 1) of log σ
    takes off: also where five members have two or three rows each."""
    (x, y), _ = table(12, seed=3)
    posterior = fit(
        (x.double(), y.double()), net=Given(0.9).double(), init="given", standardize=False,
        likelihood="gaussian", members=members,
    )  # fmt: skip
    square = float((y - 0.9 * x[:, 0]).double().square().sum())
    log_noise = torch.linspace(-4, 2, 600_001, dtype=torch.float64)
    joint = -10 * log_noise - 0.5 * square * (-2 * log_noise).exp() - 0.5 * log_noise**2
    want = float(log_noise[joint.argmax()])
    assert posterior.samples[..., -1].flatten().tolist() == pytest.approx(
        [want] * members, abs=2e-3
    )


def test_scores_are_those_of_networks_on_rows_they_have_not_seen() -> None:
    """Less one number for the noise, 1/n, as Akaike has it. A single step is no choice."""
    (x, y), _ = table(12, seed=3)
    posterior = fit(
        (x.double(), y.double()), net=Given(0.9).double(), init="given", standardize=False,
        likelihood="gaussian", steps=1,
    )  # fmt: skip
    score = float(posterior.predict(x.double()).log_prob(y.double()).mean())
    assert posterior.validation == pytest.approx(score - 1 / 12, rel=1e-6)
    assert posterior.diagnostics["held_out"]["by"] == "cross-fitting"
    assert posterior.diagnostics["held_out"]["log_prob"] == posterior.validation


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "tables"),
    [
        ("map", 3), pytest.param("map", 10, marks=slow), pytest.param("swag", 10, marks=slow),
        pytest.param("mc-dropout", 10, marks=slow),
    ],
)  # fmt: skip
def test_intervals_hold_with_twenty_rows(method: str, tables: int) -> None:
    """With the noise of training rows they held .07 to .22, at −4,000 nats; the standard error of a
    mean over ten tables is .02 to .03 here."""
    held, gains, reported = [], [], []
    for seed in range(tables):
        data, (x, y) = table(20, seed)
        posterior = fit(data, method, seed=seed)
        p = posterior.predict(x)
        low, high = p.interval(0.9)
        held.append(float(((y >= low) & (y <= high)).float().mean()))
        constant = torch.distributions.Normal(data[1].mean(), data[1].std()).log_prob(y)
        gains.append(float((p.log_prob(y) - constant).mean()))
        reported.append(posterior.diagnostics["held_out"]["gain"])
        assert posterior.status == "ok"
    assert 0.80 <= sum(held) / tables <= 0.97
    assert sum(gains) > 0
    assert abs(sum(reported) - sum(gains)) / tables < 0.25


@pytest.mark.parametrize(("rows", "status"), [(11, "not-evaluated"), (12, "ok")])
def test_the_noise_of_a_linear_model_needs_twelve_rows(rows: int, status: str) -> None:
    """With eight rows of six columns, the mean score of a linear model was .35 nats below that of a
    constant. With given noise the posterior is exact."""
    (x, y), _ = table(rows)
    assert doxa.fit(None, (x, y), "linear").status == status
    assert doxa.fit(None, (x, y), doxa.BayesianLinear(noise=0.5)).status == "ok"
    repeated = torch.arange(22) % 11
    weight = torch.full((22,), 0.5)
    again = doxa.fit(None, (x[repeated], y[repeated]), "linear", sample_weight=weight)
    assert again.status == "ok", "22 rows of the same weight"


@pytest.mark.parametrize(("rows", "method"), [(7, "map"), (8, "map"), (8, "deep-ensemble")])
def test_fewer_than_twelve_rows_do_not_evaluate_a_network(rows: int, method: str) -> None:
    data, _ = table(rows)
    status = fit(data, method, steps=50).status
    assert status == "not-evaluated"
    assert "gp; linear" in status.reason


def test_classes_are_calibrated_and_evaluated() -> None:
    (x, _), (new, _) = table(40, seed=1)
    truth = lambda x: (x[:, 0] > 0).long()  # noqa: E731
    posterior = fit((x, truth(x)), outputs=2)
    assert posterior.diagnostics["held_out"]["rows"] == 40
    assert float(posterior.predict(new).probs.argmax(1).eq(truth(new)).float().mean()) > 0.75


def test_runs_are_what_they_are_alone() -> None:
    (x, y), _ = table(40)
    rows = [torch.arange(20), torch.arange(15, 40)]
    sweep = fit((x, y), runs=doxa.Runs(rows=rows), steps=200, dtype=torch.float64)
    for one, own, spec in zip(sweep, rows, sweep.specs, strict=True):
        alone = fit((x[own], y[own]), steps=200, dtype=torch.float64, seed=spec.seed)
        assert alone.diagnostics["steps"] <= one.diagnostics["steps"]
        torch.testing.assert_close(one.samples, alone.samples, rtol=1e-6, atol=1e-9)
        assert one.validation == pytest.approx(alone.validation, rel=1e-6)


def stopped(step: int) -> Callable[[int, Any], None]:
    calls: list[int] = []

    def callback(done: int, info: Any) -> None:
        calls.append(done)
        if len(calls) >= step:
            raise KeyboardInterrupt

    return callback


@pytest.mark.parametrize("calls", [2, 9])
def test_it_is_resumed_to_the_bit(calls: int, tmp_path: Path) -> None:
    """Stopped while the parts are fitted, and while all rows are."""
    data, _ = table(20)
    options = {"steps": 60, "schedule": "constant", "patience": 100}
    want = fit(data, **options)
    with pytest.raises(KeyboardInterrupt):
        fit(data, checkpoint=tmp_path / "run", callbacks=[stopped(calls)], **options)
    got = fit(data, checkpoint=tmp_path / "run", **options)
    assert torch.equal(got.samples, want.samples)
    assert got.diagnostics["held_out"] == want.diagnostics["held_out"]


def test_it_is_saved(tmp_path: Path) -> None:
    data, (x, _) = table(20)
    posterior = fit(data, steps=100)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    assert again.status == posterior.status
    assert again.diagnostics["held_out"] == posterior.diagnostics["held_out"]
    assert torch.equal(again.predict(x[:5]).mean, posterior.predict(x[:5]).mean)


def test_a_row_is_too_few_for_anything() -> None:
    data, _ = table(1)
    assert fit(data, steps=5).status == "not-evaluated"


def test_a_start_from_another_fit() -> None:
    """From a fit to other rows, each part's network starts there. A fit to the same rows has seen
    all parts, and scores of rows that were seen are none."""
    data, other = table(20)
    earlier = fit(other, steps=300)
    found = fit(data, steps=1, lr=1e-6, init=earlier)
    assert found.diagnostics["held_out"]["cross_fit_parts"] == 5
    assert found.diagnostics["held_out"]["gain"] > 0.2, "one small step from a good start"
    again = fit(data, steps=1, init=found)
    assert again.status == "not-evaluated" and "held_out" not in again.diagnostics
    assert "no rows were held out" in again.status.reason


def test_a_start_of_the_wrong_shape_is_named_before_the_parts_are_fitted() -> None:
    data, other = table(20)
    two = fit(other, steps=5, members=2)
    with pytest.raises(doxa.errors.MethodError, match=r"2 points .* has 1 members"):
        fit(data, steps=5, init=two)
