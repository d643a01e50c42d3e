"""Acquisition functions against hand computations, peers' numbers and what must hold of them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa
from doxa import decide
from doxa.decide.batch import _Classes
from doxa.errors import DataError, MethodError, ShapeError, Unavailable

PEERS: dict[str, Any] = json.loads((Path(__file__).parent / "peer_numbers.json").read_text())


def exact(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(draws: int, rows: int, classes: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(draws, rows, classes, generator=source, dtype=torch.float64)
    return logits.softmax(2)


def brute_force(probs: Tensor, rows: tuple[int, ...]) -> float:
    """I[y_1 … y_k; f], summing over every configuration of labels."""
    total = 0.0
    for labels in itertools.product(range(probs.shape[2]), repeat=len(rows)):
        each = torch.stack([probs[:, n, c] for n, c in zip(rows, labels, strict=True)]).prod(0)
        mean = float(each.mean())
        total -= mean * math.log(mean)
    inside = torch.special.entr(probs[:, list(rows)]).sum((1, 2)).mean()
    return total - float(inside)


def test_the_lectures_votes_give_two_fifths() -> None:
    p = doxa.Predictive.from_probs(torch.eye(5)[[1, 2, 1, 1, 4]].unsqueeze(1))
    assert decide.variation_ratio(p).tolist() == pytest.approx([2 / 5])


def test_scores_are_those_of_baal() -> None:
    """To 1e-9, and EPIG to 1e-6, which baal computes in single precision."""
    table, theirs = exact(PEERS["probs"]), {k: exact(v) for k, v in PEERS["baal"].items()}
    p = doxa.Predictive.from_probs(table)
    ours = {
        "bald": decide.bald(p),
        "entropy": decide.max_entropy(p),
        "margin": 1.0 - decide.margin(p),
        "certainty": 1.0 - decide.variation_ratio(p, "mean"),
    }
    for name, scores in ours.items():
        assert (scores - theirs[name]).abs().max() < 1e-9, name
    spread = table.var(0, unbiased=False)
    assert (spread.sum(1) - theirs["variance"]).abs().max() < 1e-9  # theirs is what it says
    assert (decide.mean_std(p) - spread.sqrt().mean(1)).abs().max() < 1e-9
    target = doxa.Predictive.from_probs(table[:, :4])
    assert (decide.epig(p, target) - theirs["epig"]).abs().max() < 1e-6


def test_a_batch_is_that_of_batchbald_redux() -> None:
    found = decide.batch_bald(doxa.Predictive.from_probs(exact(PEERS["probs"])), 4)
    assert found.rows.tolist() == PEERS["redux"]["indices"]
    assert (found.scores - exact(PEERS["redux"]["scores"])).abs().max() < 1e-9


def test_exact_batches_are_those_of_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedily, over every row and configuration, so that looking at rows by falling bound, one at
    a time, loses nothing; at most the sum of BALD."""
    monkeypatch.setattr("doxa.decide.batch._BLOCK", 1)
    monkeypatch.setattr("doxa.decide.batch._LEAST", 1)
    probs = drawn(5, 9, 3, seed=1)
    p = doxa.Predictive.from_probs(probs)
    chosen: tuple[int, ...] = ()
    for worth, row in zip(*map(Tensor.tolist, reversed(decide.batch_bald(p, 4))), strict=True):
        others = [n for n in range(9) if n not in chosen]
        best = max(others, key=lambda n: brute_force(probs, (*chosen, n)))
        chosen = (*chosen, best)
        assert row == best
        assert worth == pytest.approx(brute_force(probs, chosen), abs=1e-12)
    assert worth < float(decide.bald(p)[list(chosen)].sum())


def test_bald_lies_between_zero_and_the_entropy() -> None:
    p = doxa.Predictive.from_probs(drawn(20, 200, 4))
    bald, entropy = decide.bald(p), decide.max_entropy(p)
    assert bool(((bald >= 0) & (bald <= entropy)).all())


def test_independent_rows_are_worth_their_sum() -> None:
    """Two draws of row a times two of row b, in all four combinations: the labels share nothing."""
    one = exact([[[0.9, 0.1]], [[0.2, 0.8]]])
    two = exact([[[0.6, 0.4]], [[0.1, 0.9]]])
    probs = torch.cat([one.repeat_interleave(2, 0), two.repeat(2, 1, 1)], 1)
    p = doxa.Predictive.from_probs(probs)
    found = decide.batch_bald(p, 2).scores[-1]
    assert float(found) == pytest.approx(float(decide.bald(p).sum()), abs=1e-12)


def test_drawn_configurations_estimate_the_whole_sum() -> None:
    """What a fourth row adds to three, from 40,000 configurations that are drawn in place of 27:
    the standard error is below 1.1 / √40,000 nats, of which five are allowed."""
    probs = drawn(6, 12, 3, seed=2)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    every = _Classes(weights, probs, 27, seed=0)
    some = _Classes(weights, probs, 9, seed=0)
    for i, row in enumerate((3, 7, 5)):
        if i == 2:
            some.most = 40_000
            some.table, some.draw = some._draw_from_table()
            some.drawn = True
        every._add(torch.tensor(row), i)
        some._add(torch.tensor(row), i)
    rows = torch.arange(12)
    assert not every.drawn
    assert (every._gains(rows) - some._gains(rows)).abs().max() < 5 * 1.1 / 40_000**0.5


def test_numbers_have_the_closed_forms() -> None:
    """½ log(total/σ²) for one row, ½ log det for several, −½ log(1 − ρ²) for two."""
    source = torch.Generator().manual_seed(3)
    f = torch.randn(40, 6, 1, generator=source, dtype=torch.float64)
    p = doxa.Predictive.from_samples(f, doxa.Gaussian(noise=0.5))
    covariance = torch.cov(f[:, :, 0].t(), correction=0)
    total = covariance.diagonal() + 0.25
    assert torch.allclose(decide.bald(p), 0.5 * (total / 0.25).log(), atol=1e-12)
    assert torch.allclose(decide.predictive_variance(p), total, atol=1e-12)
    found = decide.batch_bald(p, 3)
    worth = [
        0.5 * torch.logdet(torch.eye(3, dtype=f.dtype) + covariance[list(a)][:, list(a)] / 0.25)
        for a in itertools.combinations(range(6), 3)
    ]
    own = covariance[found.rows][:, found.rows]
    whole = 0.5 * torch.logdet(torch.eye(3, dtype=f.dtype) + own / 0.25)
    assert float(found.scores[-1]) == pytest.approx(float(whole), abs=1e-12)
    assert float(whole) >= (1 - 1 / math.e) * max(map(float, worth))
    target = doxa.Predictive.from_samples(f[:, :2], doxa.Gaussian(noise=0.5))
    rho = covariance[:, :2] / (total[:, None] * total[:2]).sqrt()
    rho[[0, 1], [0, 1]] = covariance.diagonal()[:2] / total[:2]  # two labels of one row
    assert torch.allclose(decide.epig(p, target), (-0.5 * (1 - rho**2).log()).mean(1), atol=1e-12)


def test_a_draw_of_twice_the_weight_is_two_draws() -> None:
    """Of classes and of numbers, alone, in a batch (all configurations, and drawn ones) and for
    other predictions."""
    twice = torch.tensor([0, 0, 1, 2, 2, 3])
    weights = exact([2.0, 1.0, 2.0, 1.0]) / 6
    probs = drawn(4, 8, 3, seed=5)
    one = doxa.Predictive.from_probs(probs, weights)
    two = doxa.Predictive.from_probs(probs[twice])
    f = 2 * torch.randn(4, 8, 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    noise = doxa.Gaussian(noise=0.5)
    numbers = doxa.Predictive(f, noise, weights=weights), doxa.Predictive(f[twice], noise)
    for p, q in ((one, two), numbers):
        assert torch.allclose(decide.bald(p), decide.bald(q), atol=1e-12)
        assert torch.allclose(decide.epig(p, p), decide.epig(q, q), atol=1e-12)
        for most in (10_000, 12):
            found, want = (decide.batch_bald(each, 4, configurations=most) for each in (p, q))
            assert found.rows.tolist() == want.rows.tolist()
            assert torch.allclose(found.scores, want.scores, atol=1e-12), most
    equal = doxa.Predictive.from_probs(probs)
    assert not torch.allclose(decide.epig(one, one), decide.epig(equal, equal), atol=1e-3)


def test_two_classes_are_the_same_as_a_bernoulli() -> None:
    yes = drawn(7, 10, 2)[:, :, 1]
    as_bernoulli = doxa.Predictive.from_samples(yes.logit(), "bernoulli")
    as_classes = doxa.Predictive.from_probs(torch.stack([1 - yes, yes], 2))
    for name in ("bald", "max_entropy", "variation_ratio", "mean_std", "margin",
                 "predictive_variance"):  # fmt: skip
        score = getattr(decide, name)
        assert torch.allclose(score(as_bernoulli), score(as_classes), atol=1e-12), name
    one, two = decide.batch_bald(as_bernoulli, 3), decide.batch_bald(as_classes, 3)
    assert one.rows.tolist() == two.rows.tolist()


def test_what_cannot_be_asked_is_said() -> None:
    p = doxa.Predictive.from_probs(drawn(3, 4, 2))
    with pytest.raises(MethodError, match="did you mean 'bald'"):
        decide.select(p, 1, by="balds")
    with pytest.raises(DataError, match="k = 5 rows, but only 4 are available"):
        decide.batch_bald(p, 5)
    with pytest.raises(DataError, match="pool is empty"):
        decide.select(p, 1, taken=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ShapeError, match="same n and seed"):
        decide.epig(p, doxa.Predictive.from_probs(drawn(4, 4, 2)))
    with pytest.raises(DataError, match="row 1 is nan"):
        decide.select(torch.tensor([0.0, torch.nan, 1.0]), 1)
    counts = doxa.Predictive.from_samples(torch.zeros(3, 4), "poisson")
    with pytest.raises(Unavailable, match="poisson"):
        decide.batch_bald(counts, 2)
