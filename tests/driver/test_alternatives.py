"""Defaults that learn a curve: other settings are fitted, and held-out rows choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa
from doxa.driver.alternatives import best_of_alternatives
from doxa.driver.runs import RunSpec
from doxa.method.method import Alternatives
from doxa.posterior import Status
from doxa.posterior.certificate import Certificate, Estimate

Data = tuple[Tensor, Tensor]


def curve(n: int = 200, seed: int = 0) -> Data:
    g = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(n, 1, generator=g) - 3
    return x, torch.cos(3 * x) + 0.1 * torch.randn(n, 1, generator=g)


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doxa.driver.alternatives.ROUNDS", 1)


def error(posterior: Any) -> float:
    """Of the mean, as a share of the curve's standard deviation."""
    x = torch.linspace(-3, 3, 500)[:, None]
    truth = torch.cos(3 * x)
    return float((posterior.predict(x).mean - truth).square().mean().sqrt() / truth.std())


def fit(data: Data, method: Any = "mc-dropout", **options: Any) -> Any:
    net = doxa.nets.mlp(1, 1, (50,))
    return doxa.fit(net, data, method, **{"standardize": True, "progress": False, **options})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["map", "mc-dropout", "concrete-dropout"])
def test_a_curve_is_learned(method: str) -> None:
    """With the default p and prior, the error of the dropout methods is above 0.6."""
    got = fit(curve(250), method)
    assert error(got) < 0.25


@pytest.mark.slow
@pytest.mark.usefixtures("one_round")
def test_held_out_rows_choose_among_dropout_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doxa.MCDropout, "default_steps", 400)
    got = fit(curve())
    found = got.diagnostics["alternatives"]
    assert found["chosen"] and found["tried"] >= 2
    assert got.validation > found["validation_of_defaults"] + 0.02
    assert "p" in got.metadata["hyper"] and got.model.prior == doxa.Normal(3.0)
    monkeypatch.setattr(doxa.MCDropout, "alternatives", None)
    before = fit(curve())
    assert before.validation == found["validation_of_defaults"]
    assert error(got) < 0.5 < error(before)


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 40}, {"epochs": 10}, {"lr": 1e-2}, {"prior": doxa.Normal(1.0)},
        {"schedule": "constant"}, {"validation": None}, {"validation": 0.2}, {"optimizer": "sgd"},
        {"method": doxa.MCDropout(p=0.1)}, {"runs": doxa.Runs(grid={"p": [0.1]})},
    ],
)  # fmt: skip
def test_settings_of_the_user_are_kept(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doxa.MCDropout, "default_steps", 40)
    got = fit(curve(60), **given)
    got = got[0] if "runs" in given else got
    assert "alternatives" not in got.diagnostics


@pytest.mark.usefixtures("one_round")
def test_dropout_layers_of_the_user_keep_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doxa.MCDropout, "default_steps", 200)
    got = doxa.fit(
        doxa.nets.mlp(1, 1, (50,), dropout=0.05), curve(), "mc-dropout", standardize=True,
        progress=False,
    )  # fmt: skip
    assert got.diagnostics["alternatives"]["tried"] == 1
    assert all(bool((p == 0.05).all()) for name, p in got.values.items() if name.endswith(".p"))


def test_without_a_clear_gain_the_defaults_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that are noise: nothing can be learned, and the weights are those of one fit."""
    monkeypatch.setattr(doxa.MAP, "default_steps", 100)
    g = torch.Generator().manual_seed(1)
    data = torch.randn(300, 1, generator=g), torch.randn(300, 1, generator=g)
    got = fit(data, "map")
    assert not got.diagnostics["alternatives"]["chosen"]
    monkeypatch.setattr(doxa.MAP, "alternatives", None)
    assert torch.equal(got.samples, fit(data, "map").samples)


@pytest.mark.slow
def test_an_interrupted_fit_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is interrupted in the second fit."""
    monkeypatch.setattr(doxa.MAP, "default_steps", 300)
    whole, calls = [], []

    def count(step: int, info: Any) -> None:
        whole.append(step)

    want = fit(curve(), "map", callbacks=[count])
    assert want.diagnostics["alternatives"]["chosen"]
    second = whole.index(min(whole), 1)  # the steps start anew

    def interrupt(step: int, info: Any) -> None:
        calls.append(step)
        if len(calls) == second + 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(curve(), "map", callbacks=[interrupt], checkpoint=tmp_path)
    assert (tmp_path / "alternatives-0").is_dir()
    got = fit(curve(), "map", checkpoint=tmp_path)
    assert torch.equal(got.samples, want.samples)


@pytest.mark.usefixtures("one_round")
def test_each_run_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run has rows without a signal."""
    monkeypatch.setattr(doxa.MAP, "default_steps", 300)
    x, y = curve(300)
    y[150:] = torch.randn(150, 1, generator=torch.Generator().manual_seed(2))
    rows = [torch.arange(150), torch.arange(150, 300)]
    sweep = fit((x, y), "map", runs=doxa.Runs(rows=rows))
    assert [p.diagnostics["alternatives"]["chosen"] for p in sweep] == [True, False]
    assert [p.record.seed for p in sweep] == [0, 1]


@pytest.mark.usefixtures("one_round")
def test_a_chosen_posterior_is_saved_with_its_prior(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doxa.MAP, "default_steps", 300)
    got = fit(curve(), "map")
    assert got.diagnostics["alternatives"]["chosen"]
    got.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    x = torch.linspace(-3, 3, 20)[:, None]
    assert torch.equal(again.predict(x).mean, got.predict(x).mean)
    assert again.model.prior == doxa.Normal(3.0)


class Scores:
    """Fits whose held-out scores are given."""

    def __init__(self, scores: Sequence[float], status: str = "ok") -> None:
        self.scores, self.status = list(scores), status
        self.factors: list[int] = []

    def posterior(self, score: float) -> Any:
        held_out = {"rows": 100, "log_prob": score, "corrected_for": 1}
        record = SimpleNamespace(
            diagnostics={"held_out": held_out}, metadata={}, validation=score,
            certificate=Certificate(log_prob=Estimate(score, score - 1, score + 1)),
        )  # fmt: skip
        return SimpleNamespace(validation=score, status=Status(self.status), record=record)

    def __call__(self, specs: Sequence[RunSpec], factor: int, name: str) -> Any:
        self.factors.append(factor)
        return [self.posterior(self.scores.pop(0)) for _ in specs]

    def best(self, first: float, rows: int) -> Any:
        given: Any = SimpleNamespace(weight=None, rows_of_run=lambda _: range(rows))
        found = best_of_alternatives(
            [self.posterior(first)], [RunSpec()], Alternatives(), given, self
        )
        held_out = found[0].record.diagnostics["held_out"]
        assert held_out["log_prob"] == found[0].record.validation
        assert held_out["log_prob"] == found[0].record.certificate.log_prob.value
        if found[0].validation != first:  # one more choice, of 100 rows
            assert held_out["log_prob"] == found[0].validation - 0.01
            assert held_out["corrected_for"] == 2
        return found[0].validation


@pytest.mark.parametrize(
    ("rows", "status", "first", "scores", "factors", "best"),
    [
        (999, "ok", 0.0, [0.01], [1], 0.0),  # few rows: always, but it is not clearly better
        (999, "ok", 0.0, [0.1], [1], 0.1),  # better, but not by so much that training goes on
        (999, "ok", 0.0, [0.5, 0.5], [1, 2], 0.5),  # training goes on, and gains nothing more
        (999, "ok", 0.0, [0.5, 1.0, 1.5], [1, 2, 4], 1.5),  # up to three rounds
        (999, "diverged", 0.0, [5.0], [1], 0.0),  # an alternative that diverged is not taken
        (1000, "ok", 0.0, [], [], 0.0),  # many rows: only where little was learned
        (1000, "underfit", 0.0, [0.1, 0.2, 0.3], [1, 2, 4], 0.3),
        (1000, "underfit", 0.0, [0.1, 0.1], [1, 2], 0.1),  # a round without a gain is the last
        (1000, "prior-collapse", 0.0, [0.0], [1], 0.0),
        (1000, "overconfident", 0.0, [], [], 0.0),
    ],
)
def test_rounds(
    rows: int, status: str, first: float, scores: list[float], factors: list[int], best: float
) -> None:
    fits = Scores(scores, status)
    assert fits.best(first, rows) == best
    assert fits.factors == factors and not fits.scores


@pytest.mark.parametrize(
    ("status", "gain", "chosen"),
    [("ok", 0.15, False), ("ok", 0.25, True), ("underfit", 0.15, True)],
)
def test_a_gain_within_two_standard_errors_replaces_no_good_fit(
    status: str, gain: float, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score of the first fit has the standard error 0.1."""
    monkeypatch.setattr("doxa.driver.alternatives.ROUNDS", 1)
    fits = Scores([gain], status)
    first = fits.posterior(0.0)
    first.record.diagnostics["held_out"]["log_prob_error"] = 0.1
    given: Any = SimpleNamespace(weight=None, rows_of_run=lambda _: range(200))
    found = best_of_alternatives([first], [RunSpec()], Alternatives(), given, fits)
    assert (found[0] is not first) == chosen
