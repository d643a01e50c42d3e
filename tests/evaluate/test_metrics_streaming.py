"""`metrics` is what the single functions say, batches say what the whole says, on any device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import TABLES, of_probs, randn
from torch import Tensor

from doxa.errors import DataError, ShapeError, Unavailable
from doxa.evaluate import table
from doxa.evaluate.calibration import ece
from doxa.evaluate.imbalance import average_precision, roc_auc
from doxa.evaluate.scores import (
    accuracy,
    brier,
    coverage,
    crps,
    log_likelihood,
    mae,
    pinball,
    risk_coverage,
    rmse,
    width,
)
from doxa.evaluate.streaming import Streaming, metrics
from doxa.likelihoods import (
    Affine,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from doxa.predictive import Moments, Predictive
from doxa.predictive.calibrated import ConformalSet

NUMBERS = ["log_likelihood", "rmse", "mae", "crps", "coverage", "width"]
CLASSES = ["log_likelihood", "accuracy", "brier", "ece"]
N = 31
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gaussian": (Gaussian(noise=0.5), (2,)),
    "no output axis": (Gaussian(noise=0.5), ()),
    "affine": (Affine(Gaussian(noise=0.5), torch.tensor(3.0), torch.tensor(2.0)), (1,)),
    "heteroscedastic": (HeteroscedasticGaussian(), (4,)),
    "images": (Gaussian(noise=0.5), (2, 3, 3)),
    "student-t": (StudentT(df=3.0, scale=0.5), ()),
    "poisson": (Poisson(), (1,)),
    "negative-binomial": (NegativeBinomial(concentration=0.7), (1,)),
    "bernoulli": (Bernoulli(), (1,)),
    "several bernoulli": (Bernoulli(), (3,)),
    "categorical": (Categorical(), (4,)),
    "segmentation": (Categorical(ignore_index=-1), (4, 3, 2)),
}


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Any, Tensor]:
    likelihood, output = CASES[name]
    f = randn(5, N, *output).to(dtype)
    y = Predictive(randn(5, N, *output, seed=7).to(dtype), likelihood).sample(1, seed=3)[0]
    if name == "segmentation":
        y[::3, 0] = -1
    return f, likelihood, y


def declared(p: Predictive, y: Any, level: float = 0.95) -> dict[str, float]:
    """The scores of the table that are means, one by one."""
    kind, found = "classes" if p.classifies else "numbers", {}
    for row in table.SCORES:
        if row.each is not None and row.of == kind:
            with suppress(Unavailable):
                found[row.name] = float(row.values(p, y, level).mean())
    return found


def ranked(p: Predictive, y: Tensor) -> dict[str, float]:
    """The scores by ranks, which one label per row has."""
    if not p.classifies or p.targets(y).numel() > len(y):
        return {}
    return {"roc_auc": roc_auc(p, y), "average_precision": average_precision(p, y)}


def test_the_table_declares_what_the_functions_give() -> None:
    f, likelihood, y = case("gaussian")
    p = Predictive(f, likelihood)
    assert declared(p, y)["pinball"] == metrics(p, y)["pinball"] == pytest.approx(pinball(p, y))
    f, likelihood, y = case("categorical")
    assert declared(Predictive(f, likelihood), y) == {}  # sets are of conformal predictives


@pytest.mark.parametrize("score", [row for row in table.SCORES if row.each], ids=lambda s: s.name)
def test_scores_of_the_table_are_whole_in_batches(score: table.Score) -> None:
    """The mean of `each` over all rows is the score, also where rows come in batches."""
    f, likelihood, y = case("images" if score.of == "numbers" else "categorical")
    p = Predictive(f, likelihood)
    if score.at_level and p.classifies:  # of conformal sets
        sets = p.probs > 0.2
        p = p.of_form(ConformalSet(p.form, 0.9, lambda: sets))
    each = score.values(p, y, 0.8)
    assert len(each) == N and each.dtype == torch.float64
    assert metrics(p, y, level=0.8)[score.name] == pytest.approx(float(each.mean()), rel=1e-12)
    stream = Streaming(level=0.8)
    for rows in torch.arange(N).split(12) if score.of == "numbers" else ():
        stream.update(Predictive(f[:, rows], likelihood), y[rows])
        assert stream.result()[score.name] == pytest.approx(
            float(each[: int(rows[-1]) + 1].mean()), rel=1e-12
        )


def test_a_score_of_an_interval_is_given_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value belongs to the level in its label, like coverage."""

    def inside(p: Predictive, y: Any, level: float) -> Tensor:
        low, high = p.interval(level)
        return ((low <= y) & (y <= high)).double()

    row = table.Score("inside", "inside", "near", "as coverage", inside, at_level=True)
    monkeypatch.setattr(table, "SCORES", (*table.SCORES, row))
    f, likelihood, y = case("gaussian")
    p = Predictive(f, likelihood)
    at = {level: metrics(p, y, level=level) for level in (0.5, 0.95)}
    assert all(found["inside"] == found["coverage"] for found in at.values())
    assert at[0.5]["inside"] < at[0.95]["inside"]


def test_conformal_sets_are_scored() -> None:
    p = Predictive.from_probs(torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.5, 0.1], [0.1, 0.1, 0.8]]))
    sets = torch.tensor([[True, False, False], [True, True, False], [True, True, False]])
    conformal = p.of_form(ConformalSet(p.form, 0.9, lambda: sets))
    found = metrics(conformal, [0, 0, 2])
    assert found["set_coverage"] == pytest.approx(2 / 3)
    assert found["set_size"] == pytest.approx(5 / 3)
    assert "set_size" not in metrics(p, [0, 0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_metrics_are_the_single_functions(name: str, dtype: torch.dtype) -> None:
    f, likelihood, y = case(name, dtype)
    p = Predictive(f, likelihood)
    found = metrics(p, y, level=0.8, bins=7)
    expected: dict[str, float]
    if likelihood.classifies:
        expected = {
            "log_likelihood": log_likelihood(p, y),
            "accuracy": accuracy(p, y),
            "brier": brier(p, y),
            "ece": ece(p, y, bins=7),
        }
    else:
        expected = {
            "log_likelihood": log_likelihood(p, y),
            "rmse": rmse(p, y),
            "mae": mae(p, y),
            "crps": crps(p, y),
            "coverage": coverage(p, y, 0.8),
            "width": width(p, 0.8),
        }
    assert list(expected) == (CLASSES if likelihood.classifies else NUMBERS)
    expected |= ranked(p, y) | declared(p, y, 0.8)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-12)
    assert all(type(value) is float for value in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_batches_give_what_the_whole_gives(name: str) -> None:
    f, likelihood, y = case(name)
    whole = metrics(Predictive(f, likelihood), y)
    stream = Streaming()
    for rows in torch.arange(N).split([1, 17, 13]):
        stream.update(Predictive(f[:, rows], likelihood), y[rows])
    found = stream.result()
    # From draws, which differ from batch to batch:
    if name in ("student-t", "poisson", "negative-binomial"):
        assert found.pop("crps") == pytest.approx(whole.pop("crps"), rel=0.05)
    assert found == pytest.approx(whole, rel=1e-12, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_any_batches(sizes: list[int]) -> None:
    """Ties and probabilities on edges included, and the ranks where they are kept."""
    probs, label = TABLES["calibrated"]
    whole = metrics(of_probs(probs), label, bins=4)
    whole["adaptive_ece"] = ece(of_probs(probs), label, "adaptive", 4)
    assert abs(whole["adaptive_ece"] - whole["ece"]) > 1e-3  # or the bins would not matter
    whole["aurc"] = risk_coverage(of_probs(probs), label).area
    stream, start = Streaming(bins=4, ranks=True), 0
    for size in [*sizes, len(label)]:
        rows = slice(start, start + size)
        if start < len(label):
            stream.update(of_probs(probs[rows]), label[rows])
        start += size
    assert stream.result() == pytest.approx(whole, abs=1e-12)


def test_ranks_of_numbers() -> None:
    f, likelihood, y = case("heteroscedastic")
    stream = Streaming(ranks=True)
    for rows in torch.arange(N).split(9):
        stream.update(Predictive(f[:, rows], likelihood), y[rows])
    area = risk_coverage(Predictive(f, likelihood), y).area
    assert stream.result()["aurc"] == pytest.approx(area, rel=1e-12)


def test_several_heads() -> None:
    f = (randn(3, 6, 1), randn(3, 6, 4))
    p = Predictive(f, [Gaussian(noise=1.0), Categorical()])
    y = (randn(6, 1, seed=1), torch.arange(6) % 4)
    found = metrics(p, y)
    of_heads = zip((NUMBERS, CLASSES), p.heads, y, strict=True)
    names = [[*kind, *ranked(head, own), *declared(head, own)] for kind, head, own in of_heads]
    assert list(found) == [f"{i}.{name}" for i, each in enumerate(names) for name in each]
    assert found["0.rmse"] == rmse(p.heads[0], y[0])
    assert found["1.brier"] == brier(p.heads[1], y[1])
    with pytest.raises(DataError, match="a tuple of 2"):
        metrics(p, y[0])


def test_moments_alone() -> None:
    f, likelihood, y = case("gaussian")
    moments = Moments(likelihood)
    moments.update(f)
    p = Predictive(f, likelihood)
    of_the_mean = declared(moments.result(), y)  # scores of the table that need the mean alone
    assert metrics(moments.result(), y) == pytest.approx(
        {"rmse": rmse(p, y), "mae": mae(p, y), **of_the_mean}
    )
    matched = metrics(moments.result().moment_matched(), y)
    assert list(matched) == [*NUMBERS, *declared(moments.result().moment_matched(), y)]
    assert matched["crps"] == pytest.approx(crps(p, y, "normal"))
    f, likelihood, y = case("segmentation")
    moments = Moments(likelihood)
    moments.update(f)
    whole = metrics(Predictive(f, likelihood), y)
    assert metrics(moments.result(), y) == pytest.approx(whole, rel=1e-12)


def test_targets_in_any_form() -> None:
    """[N] means [N, 1]; lists and arrays are tensors; nothing is broadcast."""
    f, likelihood, y = case("affine")
    p = Predictive(f, likelihood)
    assert torch.equal(p.targets(y[:, 0]), p.targets(y))
    assert metrics(p, y[:, 0].numpy()) == metrics(p, y) == metrics(p, y.tolist())
    for wrong in (y.T, y[:, :, None], torch.tensor(1.0)):
        with pytest.raises(ShapeError):
            metrics(p, wrong)


def test_what_cannot_be_scored() -> None:
    f, likelihood, y = case("gaussian")
    p = Predictive(f, likelihood)
    stream = Streaming()
    with pytest.raises(DataError, match="no batch was added"):
        stream.result()
    stream.update(p, y)
    before = stream.result()
    with pytest.raises(DataError, match="row 2"):
        stream.update(p, y.index_fill(0, torch.tensor([2]), torch.nan))
    assert stream.result() == before  # a batch that cannot be scored leaves no trace
    with pytest.raises(DataError, match="cannot be scored together"):
        stream.update(of_probs(np.array([[0.5, 0.5]])), [0])
    moments = Moments(likelihood)
    moments.update(f)
    with pytest.raises(DataError, match="some batches have and some lack"):
        stream.update(moments.result(), y)
    assert stream.result() == before
    for settings_ in ({"level": 0.0}, {"level": 1.0}, {"bins": 0}):
        with pytest.raises(DataError):
            Streaming(**settings_)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name: str) -> None:
    f, likelihood, y = case(name)
    if name == "affine":
        likelihood = Affine(Gaussian(noise=0.5), torch.tensor(3.0).cuda(), torch.tensor(2.0).cuda())
    here, there = Streaming(ranks=True), Streaming(ranks=True)
    here.update(Predictive(f, CASES[name][0]), y)
    there.update(Predictive(f.cuda(), likelihood), y)
    assert there.result() == pytest.approx(here.result(), rel=1e-9)
    if likelihood.classifies:
        for kind in ("class-wise", "adaptive-class-wise", "debiased", "kde"):
            on_gpu = ece(Predictive(f.cuda(), likelihood), y, kind)
            assert on_gpu == pytest.approx(ece(Predictive(f, likelihood), y, kind), rel=1e-9)


def test_an_error_of_calibration_has_fifteen_bins_unless_asked() -> None:
    g = torch.Generator().manual_seed(0)
    p = Predictive.from_probs(torch.rand(400, 3, generator=g).double().softmax(1))
    y = torch.randint(3, (400,), generator=g)
    assert metrics(p, y)["ece"] == ece(p, y, bins=15) == ece(p, y) != ece(p, y, bins=16)
