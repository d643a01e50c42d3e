"""Conformal thresholds, scores and sets: the exact law of coverage, and naive loops."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from given_posterior import GivenPosterior
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from doxa.errors import DataError, MethodError, Unavailable
from doxa.evaluate import metrics
from doxa.evaluate.conformal import (
    adaptive_scores,
    class_scores,
    conformal,
    rank,
    row_uniforms,
    rows_needed,
    threshold,
    thresholds_by,
)
from doxa.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from doxa.predictive import Predictive

REPETITIONS, TEST_ROWS = 1000, 1000
CLASSES = GivenPosterior("categorical")
NUMBERS = GivenPosterior(Gaussian(noise=1.0))


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def band(n: int, k: int, rows: int, repetitions: int = REPETITIONS) -> tuple[float, float]:
    """The 99 % band of mean coverage over repetitions. Given the calibration rows coverage is
    Beta(k, n + 1 - k), and the hits among `rows` are then binomial."""
    mean = k / (n + 1)
    between = mean * (1 - mean) / (n + 2)
    within = (mean * (1 - mean) - between) / rows
    half = 2.576 * math.sqrt((between + within) / repetitions)
    return mean - half, mean + half


def true_rank(n: int, hundredths: int) -> int:
    """In whole numbers: the least k with 100 k >= (n + 1) level."""
    return next(k for k in range(n + 2) if 100 * k >= (n + 1) * hundredths)


@pytest.mark.parametrize("hundredths", [90, 95])
@pytest.mark.parametrize("n", [50, 100, 200, 500, 1000])
def test_mean_coverage_follows_the_exact_law(n: int, hundredths: int) -> None:
    """Any continuous score is uniform after a monotone map, so that uniforms stand for all. Each
    case leaves its 99 % band for one seed in a hundred."""
    g = rng(n + hundredths)
    scores = torch.rand(n, REPETITIONS, generator=g, dtype=torch.float64)
    t = threshold(scores, hundredths / 100)
    new = torch.rand(TEST_ROWS, REPETITIONS, generator=g, dtype=torch.float64)
    coverage = float((new <= t).double().mean())
    low, high = band(n, true_rank(n, hundredths), TEST_ROWS)
    assert low < coverage < high


def test_without_the_correction_fifty_rows_fall_short() -> None:
    """The plain 0.9-quantile, the 45th of 50, lies outside the band; so would an off-by-one."""
    g = rng(0)
    scores = torch.rand(50, REPETITIONS, generator=g, dtype=torch.float64)
    new = torch.rand(TEST_ROWS, REPETITIONS, generator=g, dtype=torch.float64)
    low, high = band(50, true_rank(50, 90), TEST_ROWS)
    for k, inside in ((45, False), (46, True), (47, False)):
        coverage = float((new <= scores.sort(0)[0][k - 1]).double().mean())
        assert (low < coverage < high) is inside


@pytest.mark.slow
@pytest.mark.parametrize("score", ["lac", "aps"])
@pytest.mark.parametrize("n", [50, 200, 1000])
def test_coverage_within_every_class(n: int, score: str) -> None:
    """n calibration rows and 100 new ones of each of 3 classes, 1,000 repetitions, through the
    scores and thresholds that `conformal` uses."""
    g, classes, repetitions, m = rng(n), 3, REPETITIONS, 100

    def scored(rows: int) -> Tensor:
        """[classes, rows, repetitions]: the score of the true class; harder for higher ones."""
        y = torch.arange(classes).repeat_interleave(rows * repetitions)
        logits = torch.randn(len(y), classes, generator=g, dtype=torch.float64)
        logits[torch.arange(len(y)), y] += 2.0 - y
        each = class_scores(score, logits.log_softmax(1), True, n)
        return each.gather(1, y.unsqueeze(1)).reshape(classes, rows, repetitions)

    held, new = scored(n), scored(m)
    index = torch.arange(classes).repeat_interleave(n)
    t = thresholds_by(held.flatten(0, 1), index, ["0", "1", "2"], 0.9)  # [classes, repetitions]
    coverage = (new <= t.unsqueeze(1)).double().mean((1, 2))
    low, high = band(n, true_rank(n, 90), m, repetitions)
    assert bool(((low < coverage) & (coverage < high)).all())
    # One threshold for all gives the easy class too much and the hard one too little.
    single = (new <= threshold(held.flatten(0, 1), 0.9)).double().mean((1, 2))
    assert single[0] > high and single[2] < low


@given(st.integers(1, 400), st.integers(1, 99))
def test_rank_and_rows_needed_are_exact(n: int, hundredths: int) -> None:
    level = hundredths / 100
    assert rank(n, level) == true_rank(n, hundredths)
    assert rank(n, 1 - (1 - level)) == true_rank(n, hundredths)  # however it was written
    least = rows_needed(level)
    assert true_rank(least, hundredths) <= least
    assert least == 1 or true_rank(least - 1, hundredths) > least - 1


@given(st.lists(st.integers(0, 4), min_size=9, max_size=60), st.sampled_from([0.5, 0.8, 0.9]))
def test_ties_are_counted_inside(values: list[int], level: float) -> None:
    """The threshold is the least score that at least rank rows do not exceed."""
    t = float(threshold(torch.tensor(values).double(), level))
    k = rank(len(values), level)
    assert sum(v <= t for v in values) >= k > sum(v < t for v in values)


def test_adaptive_scores_are_those_of_the_paper() -> None:
    """One class at a time: the mass of all that come before it, and u of its own."""
    g = rng(0)
    probs = torch.softmax(torch.randn(30, 5, generator=g, dtype=torch.float64).round(), 1)  # ties
    u = torch.rand(30, 1, generator=g, dtype=torch.float64)
    got = adaptive_scores(probs, u)
    for i, c in itertools.product(range(30), range(5)):
        p = probs[i].tolist()
        before = [p[d] for d in range(5) if (p[d], -d) > (p[c], -c)]
        assert float(got[i, c]) == pytest.approx(sum(before) + float(u[i]) * p[c], abs=1e-12)


def labelled(n: int, seed: int = 0, classes: int = 4) -> tuple[Tensor, Tensor]:
    g = rng(seed)
    logits = 2.0 * torch.randn(n, 1, classes, generator=g, dtype=torch.float64)
    probs = torch.softmax(logits[:, 0], 1)
    return 1.5 * logits, torch.multinomial(probs, 1, generator=g).squeeze(1)


def test_least_ambiguous_sets_are_those_of_a_loop() -> None:
    x, y = labelled(60)
    new, _ = labelled(20, seed=1)
    p = conformal(CLASSES, (x, y), 0.8).predict(new)
    held = torch.softmax(x[:, 0], 1)
    worst = sorted(1.0 - float(held[i, y[i]]) for i in range(60))[true_rank(60, 80) - 1]
    want = 1.0 - torch.softmax(new[:, 0], 1) <= worst + 1e-12
    assert torch.equal(p.prediction_set(), want)
    assert torch.equal(p.prediction_set(0.8), want)
    torch.testing.assert_close(p.probs, CLASSES.predict(new).probs)
    assert torch.equal(p.log_prob(y[:20]), CLASSES.predict(new).log_prob(y[:20]))


@pytest.mark.parametrize("kind", ["lac", "aps", "aps, deterministic", "mondrian", "mondrian aps"])
def test_sets_hold_their_level_end_to_end(kind: str) -> None:
    """200 repetitions of 100 calibration and 100 new rows; 99 % band (deterministic sets only
    have the lower end)."""
    options: dict[str, Any] = {"kind": kind.split()[0].rstrip(",")}
    if "deterministic" in kind:
        options["randomized"] = False
    if kind == "mondrian aps":
        options["score"] = "aps"
    hits, sizes = [], []
    for r in range(200):
        x, y = labelled(200, seed=r, classes=3)
        level = 0.9 if "mondrian" not in kind else 0.7  # fewer rows a class
        posterior = conformal(CLASSES, (x[:100], y[:100]), level, seed=r, **options)
        chosen = posterior.predict(x[100:]).prediction_set()
        hits.append(float(chosen.gather(1, y[100:, None]).double().mean()))
        sizes.append(chosen.sum(1))
        if "deterministic" in kind:
            assert int(chosen.sum(1).min()) >= 1
    coverage = sum(hits) / 200
    if "mondrian" in kind:
        assert 0.7 - 0.02 < coverage < 0.7 + 3 / 100 + 0.02  # one in about 30 rows a class more
        return
    low, high = band(100, true_rank(100, 90), 100, 200)
    assert coverage > low and (coverage < high or "deterministic" in kind)


def test_randomised_sets_repeat_with_their_seed() -> None:
    x, y = labelled(100)
    a, b, c = (conformal(CLASSES, (x, y), kind="aps", seed=s).predict(x) for s in (0, 0, 1))
    assert torch.equal(a.prediction_set(), b.prediction_set())
    assert not torch.equal(a.prediction_set(), c.prediction_set())


@pytest.mark.parametrize("rows", [1, 7])
def test_a_rows_randomness_is_its_own(rows: int) -> None:
    """Whoever else is asked about, in whatever order: the sets of rows that come alone, or a few at
    a time, are those of all at once."""
    x, y = labelled(100)
    posterior = conformal(CLASSES, (x, y), 0.85, "aps")
    new, _ = labelled(70, seed=1)
    at_once = posterior.predict(new).prediction_set()
    parts = [posterior.predict(part).prediction_set() for part in new.split(rows)]
    assert torch.equal(torch.cat(parts), at_once)
    order = torch.randperm(70, generator=rng(2))
    assert torch.equal(posterior.predict(new[order]).prediction_set(), at_once[order])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 6])
def test_adaptive_sets_hold_their_level_row_by_row(seed: int) -> None:
    """150 calibration sets, 20 new rows each, asked about one at a time: the 99.9 % band. Were
    u the first number of a stream of the seed (0.22 and 0.91), all new rows would share it."""
    hits = []
    for r in range(150):
        x, y = labelled(70, seed=r)
        posterior = conformal(CLASSES, (x[:50], y[:50]), 0.85, "aps", seed=seed)
        own = [posterior.predict(row).prediction_set()[0] for row in x[50:].split(1)]
        hits.append(torch.stack(own).gather(1, y[50:, None]).double().mean())
    low, high = band(50, true_rank(50, 85), 20, 150)
    wider = (high - low) * (3.291 / 2.576 - 1) / 2
    assert low - wider < float(torch.stack(hits).mean()) < high + wider


def test_the_randomness_of_rows_is_uniform_and_independent_of_them() -> None:
    """Against the uniform law by Kolmogorov and Smirnov, 1 in 1,000 each: of sure and of unsure
    rows, and for one class likeliest or another."""
    x, _ = labelled(4000, classes=3)
    log_table = x[:, 0].log_softmax(1)
    u = row_uniforms(log_table, 5).squeeze(1)
    sure, best = log_table.amax(1) > -0.2, log_table.argmax(1)
    for some in (sure, ~sure, best == 0, best == 2):
        assert stats.kstest(u[some].numpy(), "uniform").pvalue > 1e-3
    one = row_uniforms(log_table.float(), 5).double().squeeze(1)  # rounded as single precision is
    apart = (one - u).abs()
    assert float(torch.minimum(apart, 1 - apart).max()) < 0.05


def test_equal_predictions_keep_the_level() -> None:
    """A constant classifier of two classes: every row has the same u, in calibration and later, so
    that equal labels have equal scores, and sets are too large rather than too small."""
    hits = []
    for r in range(300):
        f = torch.tensor([[[0.4, 0.0]]]).double().expand(60, 1, 2)
        y = (torch.rand(60, generator=rng(r)) > math.exp(0.4) / (1 + math.exp(0.4))).long()
        posterior = conformal(CLASSES, (f[:40], y[:40]), 0.8, "aps", seed=r)
        hits.append(posterior.predict(f[40:]).prediction_set().gather(1, y[40:, None]).double())
    assert float(torch.cat(hits).mean()) > 0.8 - 3.3 * (0.16 / 300) ** 0.5  # 1 in 2,000 at most


def heteroscedastic(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Network outputs (mean, raw scale), y, and the standard deviation in each row: it grows
    tenfold. The network says 0.8 of it."""
    g = rng(seed)
    std = 10.0 ** torch.rand(n, 1, generator=g, dtype=torch.float64)
    mean = torch.randn(n, 1, generator=g, dtype=torch.float64)
    raw = torch.expm1(0.8 * std - 1e-3).log()
    y = mean + std * torch.randn(n, 1, generator=g, dtype=torch.float64)
    return torch.cat([mean, raw], 1).unsqueeze(1), y, std


@pytest.mark.parametrize("kind", ["split", "scaled", "cqr"])
def test_intervals_hold_their_level_on_uneven_noise(kind: str) -> None:
    """100 repetitions of 200 calibration and 500 new rows inside the 99 % band; scaled and CQR are
    narrow where the noise is small, split is not."""
    base = GivenPosterior(HeteroscedasticGaussian())
    hits, narrow, calm, wild = [], [], [], []
    for r in range(100):
        x, y, std = heteroscedastic(700, r)
        options: dict[str, Any] = {"kind": "split", "scaled": True} if kind == "scaled" else {}
        posterior = conformal(base, (x[:200], y[:200]), 0.9, **({"kind": kind} | options))
        low, high = posterior.predict(x[200:]).interval()
        inside = (low <= y[200:]) & (y[200:] <= high)
        quiet, loud = std[200:] < 10**0.25, std[200:] > 10**0.75
        hits.append(float(inside.double().mean()))
        calm.append(float(inside[quiet].double().mean()))
        wild.append(float(inside[loud].double().mean()))
        narrow.append(float((high - low)[quiet].mean() / (high - low)[loud].mean()))
    low_end, high_end = band(200, true_rank(200, 90), 500, 100)
    assert low_end < sum(hits) / 100 < high_end
    ratio, quiet_hits, loud_hits = (sum(v) / 100 for v in (narrow, calm, wild))
    if kind == "split":
        assert ratio == pytest.approx(1.0)
        assert quiet_hits > 0.99 and loud_hits < 0.8
    elif kind == "scaled":
        assert ratio < 0.25  # the noise ratio of the outer quarters is 10 ** -0.75 = 0.18
        assert abs(quiet_hits - 0.9) < 0.02 and abs(loud_hits - 0.9) < 0.02
    else:
        assert ratio < 0.35
        assert abs(loud_hits - 0.9) < 0.05 and quiet_hits < 0.98


def test_cqr_is_the_papers_interval() -> None:
    base = GivenPosterior(HeteroscedasticGaussian())
    x, y, _ = heteroscedastic(50, 0)
    p, q = conformal(base, (x, y), 0.8, "cqr").predict(x), base.predict(x)
    low, high = q.quantile([0.1, 0.9])
    scores = sorted(max(float(a - t), float(t - b)) for a, b, t in zip(low, high, y, strict=True))
    t = scores[true_rank(50, 80) - 1]
    torch.testing.assert_close(p.interval()[0], low - t)
    torch.testing.assert_close(p.interval()[1], high + t)


def test_cqr_narrows_a_wide_predictive_and_never_crosses() -> None:
    """Rows predicted almost exactly, by N(f, 1): the intervals shrink; elsewhere, where the
    predictive is narrower than the threshold, they are a point."""
    wide = GivenPosterior(HeteroscedasticGaussian())
    n = 30
    f = torch.randn(n, generator=rng(0), dtype=torch.float64)
    raw = torch.full((n,), math.log(math.expm1(1.0 - 1e-3)), dtype=torch.float64)
    posterior = conformal(wide, (torch.stack([f, raw], 1)[:, None], f + 1e-3), 0.9, "cqr")
    low, high = posterior.predict(torch.stack([f, raw], 1)[:, None]).interval()
    torch.testing.assert_close(high - low, torch.full((n, 1), 2e-3).double())
    sharp = torch.stack([f, raw - 6.0], 1)[:, None]
    low, high = posterior.predict(sharp).interval()
    torch.testing.assert_close(low.flatten(), f)
    torch.testing.assert_close(high.flatten(), f)


@given(st.integers(0, 10_000), st.sampled_from([torch.float32, torch.float64]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_on_the_edge_stay_inside(seed: int, dtype: torch.dtype, scaled: bool) -> None:
    """At least rank of the calibration rows are inside, though edges are rounded."""
    g = rng(seed)
    f = 10.0 ** torch.randint(-3, 6, (40, 3, 1), generator=g) * torch.randn(40, 3, 1, generator=g)
    y = f.mean(1) + torch.randint(-2, 3, (40, 1), generator=g)
    f, y = f.to(dtype), y.to(dtype)
    low, high = conformal(NUMBERS, (f, y), 0.9, scaled=scaled).predict(f).interval()
    assert low.dtype == dtype
    assert int(((low <= y) & (y <= high)).sum()) >= rank(40, 0.9)


def test_groups_have_thresholds_of_their_own() -> None:
    """Group 1 has errors ten times as large; the column that says so is also an output here."""
    g = rng(0)
    x = torch.randn(200, 1, 2, generator=g, dtype=torch.float64)
    group = torch.randint(2, (200,), generator=g)
    y = x[:, 0] + 10.0 ** group[:, None] * torch.randn(200, 2, generator=g, dtype=torch.float64)
    known = {float(t): int(c) for t, c in zip(x[:, 0, 0], group, strict=True)}

    def of(rows: Tensor) -> list[str]:
        return [f"g{known[float(t)]}" for t in rows[:, 0, 0]]

    posterior = conformal(NUMBERS, (x, y), 0.9, "mondrian", groups=of)
    low, high = posterior.predict(x).interval()
    for g_ in (0, 1):
        mine = group == g_
        own = conformal(NUMBERS, (x[mine], y[mine]), 0.9).predict(x[mine]).interval()
        torch.testing.assert_close((low[mine], high[mine]), own)
    with pytest.raises(DataError, match=r"row 0 is of group 'g9'.*'g0', 'g1'"):
        known[float(x[0, 0, 0])] = 9
        posterior.predict(x)


def test_sets_by_group() -> None:
    x, y = labelled(120)
    by = (x[:, 0, 0] > 0).long()
    posterior = conformal(CLASSES, (x, y), 0.8, "mondrian", groups=lambda t: t[:, 0, 0] > 0)
    chosen = posterior.predict(x).prediction_set()
    for g in (0, 1):
        own = conformal(CLASSES, (x[by == g], y[by == g]), 0.8).predict(x[by == g])
        assert torch.equal(chosen[by == g], own.prediction_set())


def test_a_plain_predictive_has_the_smallest_set_of_its_mass() -> None:
    g = rng(0)
    probs = torch.softmax(torch.randn(40, 5, generator=g, dtype=torch.float64), 1)
    p = Predictive.from_probs(probs)
    for level in (0.3, 0.8, 0.95):
        chosen = p.prediction_set(level)
        mass = (probs * chosen).sum(1)
        assert bool((mass >= level - 1e-12).all())
        for i in range(40):
            smaller = int(chosen[i].sum()) - 1
            subsets = itertools.combinations(probs[i].tolist(), smaller)
            assert all(sum(subset) < level for subset in subsets)
    assert torch.equal(p.prediction_set(), p.prediction_set(0.95))
    yes = Predictive(torch.tensor([[[3.0], [0.0], [-3.0]]]), Bernoulli())
    want = torch.tensor([[False, True], [True, True], [True, False]]).unsqueeze(2)
    assert torch.equal(yes.prediction_set(0.9), want)
    with pytest.raises(Unavailable, match="use interval"):
        NUMBERS.predict(torch.zeros(2, 1, 1)).prediction_set()
    with pytest.raises(DataError, match="level"):
        p.prediction_set(1.0)


def test_one_level_and_no_other() -> None:
    f = torch.randn(30, 1, 1, generator=rng(0))
    p = conformal(NUMBERS, (f, f[:, 0] + 1.0), 0.9).predict(f)
    assert torch.equal(p.interval(0.9)[0], p.interval()[0])
    with pytest.raises(Unavailable, match=r"calibrated for level 0\.9, not for 0\.95"):
        p.interval(0.95)
    sets = conformal(CLASSES, labelled(60), 0.8).predict(labelled(60)[0])
    with pytest.raises(Unavailable, match=r"level 0\.8, not for 0\.9"):
        sets.prediction_set(0.9)
    with pytest.raises(Unavailable, match="classes have no order"):
        sets.interval()
    with pytest.raises(Unavailable, match="use interval"):
        p.prediction_set()
    assert "coverage" not in metrics(p, f[:, 0])  # at 0.95, which it does not know
    assert {"coverage", "width"} <= set(metrics(p, f[:, 0], level=0.9))


def test_everything_else_is_the_bases() -> None:
    f = torch.randn(30, 4, 2, generator=rng(0), dtype=torch.float64)
    y = f.mean(1) + 1.0
    base, p = NUMBERS.predict(f), conformal(NUMBERS, (f, y)).predict(f)
    for name in (
        "mean", "variance", "std", "aleatoric", "epistemic", "samples", "weights",
        "expected_entropy",
    ):  # fmt: skip
        assert torch.equal(getattr(p, name), getattr(base, name)), name
    assert torch.equal(p.log_prob(y), base.log_prob(y))
    assert torch.equal(p.quantile(0.2), base.quantile(0.2))
    assert torch.equal(p.cdf(y), base.cdf(y))
    assert torch.equal(p.sample(3, 1), base.sample(3, 1))
    assert torch.equal(p.moment_matched().log_prob(y), base.moment_matched().log_prob(y))
    x, _ = labelled(30)
    q, sets = CLASSES.predict(x), conformal(CLASSES, labelled(30)).predict(x)
    for name in ("probs", "entropy", "mutual_information", "variation_ratio"):
        assert torch.equal(getattr(sets, name), getattr(q, name)), name
    assert torch.equal(sets.votes(), q.votes())


def test_counts_have_intervals_too() -> None:
    g = rng(0)
    f = torch.randn(300, 1, 1, generator=g, dtype=torch.float64)
    y = torch.poisson(f[:, 0].exp(), generator=g)
    posterior = conformal(GivenPosterior(Poisson()), (f[:150], y[:150]), 0.9, scaled=True)
    low, high = posterior.predict(f[150:]).interval()
    inside = ((low <= y[150:]) & (y[150:] <= high)).double().mean()
    assert float(inside) > 0.9 - 4 * (0.09 * (1 / 150 + 1 / 150)) ** 0.5


def test_moments_are_enough_for_means_and_probabilities() -> None:
    f = torch.randn(40, 3, 1, generator=rng(0), dtype=torch.float64)
    for options in ({}, {"scaled": True}):
        posterior = conformal(NUMBERS, (f, f.mean(1) + 1.0), **options)  # type: ignore[arg-type]
        a, b = posterior.predict(f).interval(), posterior.predict(f, keep="moments").interval()
        torch.testing.assert_close(a, b)
    x, y = labelled(60)
    for kind in ("lac", "aps"):
        sets = conformal(CLASSES, (x, y), 0.8, kind)
        a_set, b_set = (sets.predict(x, keep=k).prediction_set() for k in ("samples", "moments"))
        assert float((a_set == b_set).double().mean()) > 0.99  # a score may round to either side
    cqr = conformal(NUMBERS, (f, f.mean(1) + 1.0), kind="cqr")
    with pytest.raises(Unavailable, match="keep='samples'"):
        cqr.predict(f, keep="moments").interval()


def test_bad_input_is_named() -> None:
    f = torch.randn(30, 1, 1, generator=rng(0), dtype=torch.float64)
    y = f[:, 0] + 1.0
    with pytest.raises(DataError, match=r"18 calibration rows cannot .* 0\.95: at least 19"):
        conformal(NUMBERS, (f[:18], y[:18]), 0.95)
    conformal(NUMBERS, (f[:19], y[:19]), 0.95)
    low, high = conformal(NUMBERS, (f[:5], y[:5]), 0.9, allow_infinite=True).predict(f).interval()
    assert bool((low == -torch.inf).all() & (high == torch.inf).all())
    for level in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(DataError, match="level"):
            conformal(NUMBERS, (f, y), level)
    with pytest.raises(MethodError, match="did you mean 'split'"):
        conformal(NUMBERS, (f, y), kind="splitt")
    with pytest.raises(MethodError, match=r"'lac' does not fit .* gaussian .*: split, cqr, mondr"):
        conformal(NUMBERS, (f, y), kind="lac")
    with pytest.raises(MethodError, match=r"'cqr' does not fit .*: lac, aps, mondrian"):
        conformal(CLASSES, labelled(30), kind="cqr")
    with pytest.raises(MethodError, match="needs groups="):
        conformal(NUMBERS, (f, y), kind="mondrian")
    with pytest.raises(MethodError, match="groups is an option of kind='mondrian'"):
        conformal(NUMBERS, (f, y), groups=0)
    with pytest.raises(MethodError, match="a column of x or a function"):
        conformal(NUMBERS, (f, y), kind="mondrian", groups="site")
    with pytest.raises(MethodError, match="scaled is an option of 'split'"):
        conformal(NUMBERS, (f, y), kind="cqr", scaled=True)
    with pytest.raises(MethodError, match="give the Sweep"):
        conformal(NUMBERS, (f, y), kind="jackknife+")
    with pytest.raises(DataError, match="group"):
        conformal(NUMBERS, (f, y), kind="mondrian", groups=lambda x: [0] * 25 + [1] * 5)
    broken = f.clone()
    broken[3] = torch.nan
    with pytest.raises(DataError, match="row 3 is not finite"):
        conformal(NUMBERS, (broken, y))
    with pytest.raises(DataError, match="NaN"):
        conformal(NUMBERS, (f, y)).predict(broken).interval()
    x, label = labelled(60)
    with pytest.raises(DataError, match="row 0 is not a class"):
        conformal(CLASSES, (x, label + 4))
    broken = x.clone()
    broken[3] = torch.nan
    with pytest.raises(DataError, match="row 3 is not finite"):
        conformal(CLASSES, (broken, label))
    with pytest.raises(DataError, match="not finite"):
        conformal(CLASSES, (x, label)).predict(broken).prediction_set()
    with pytest.raises(DataError, match="standard deviation is 0"):
        flat = GivenPosterior(Poisson())
        conformal(flat, (torch.full_like(f, -800.0), torch.zeros(30, 1)), scaled=True)
    segments = GivenPosterior(Categorical())
    with pytest.raises(MethodError, match="one label a row"):
        conformal(segments, (x.reshape(20, 1, 4, 3), label.reshape(20, 3)))


def test_a_class_absent_from_calibration() -> None:
    x, y = labelled(100)
    rows = y != 2
    with pytest.raises(DataError, match=r"0 calibration rows of class 2 .* at least 9"):
        conformal(CLASSES, (x[rows], y[rows]), kind="mondrian")
    posterior = conformal(CLASSES, (x[rows], y[rows]), kind="mondrian", allow_infinite=True)
    chosen = posterior.predict(x).prediction_set()
    assert bool(chosen[:, 2].all())
    assert not bool(chosen[:, 0].all())


def test_every_group_has_the_same_weight_in_a_threshold() -> None:
    """Against a loop in exact fractions; groups of one row give the usual rank."""
    group = torch.tensor([0] * 7 + [1] * 2 + [2] * 11 + [3] + [4] * 3)
    scores = torch.randn(len(group), 3, generator=rng(0), dtype=torch.float64)
    sizes = group.bincount()
    for level in (Fraction(1, 2), Fraction(4, 5), Fraction(5, 6)):
        got = threshold(scores, float(level), group=group)
        for column in range(3):
            each = sorted(zip(scores[:, column].tolist(), group.tolist(), strict=True))
            total, want = Fraction(0), math.inf
            for score, g in each:
                total += Fraction(1, 6 * int(sizes[g]))
                if total >= level:
                    want = score
                    break
            assert float(got[column]) == want
    alone = torch.arange(len(group))
    for level in (0.5, 0.8, 0.9, 0.95):
        assert torch.equal(threshold(scores, level, group=alone), threshold(scores, level))
    with pytest.raises(DataError, match=r"5 groups .* at least 9 groups"):
        threshold(scores, 0.9, group=group)
    assert threshold(scores, 0.9, group=group, allow_infinite=True).tolist() == [math.inf] * 3


@pytest.mark.parametrize("kind", ["split", "cqr", "lac", "aps"])
def test_the_level_holds_for_new_groups(kind: str) -> None:
    """300 repetitions of 20 groups of 1 or 30 rows. The errors of a small group are eight times as
    large, so that without groups, where the large ones decide, coverage is too small. At level .8,
    coverage of one row of a new group lies between .8 and .8 + 1/21 (four standard errors of 300
    draws: .092)."""
    hits = {True: 0, False: 0}
    classify = kind in ("lac", "aps")
    likelihood = CLASSES if classify else NUMBERS
    for r in range(300):
        g = rng(r)
        big = torch.rand(21, generator=g) < 0.3
        sizes = torch.where(big, 30, 1)
        sizes[20] = 1  # the new group: one of its rows
        group = torch.arange(21).repeat_interleave(sizes)
        n = len(group)
        scale = torch.where(big, 1.0, 8.0)[group].double()
        common = torch.randn(21, generator=g, dtype=torch.float64)[group]
        error = scale * (common + 0.5 * torch.randn(n, generator=g, dtype=torch.float64))
        if classify:
            f = torch.zeros(1, n, 3, dtype=torch.float64)
            f[0, :, 0] = 1.5 - error  # class 0 is always right, with more or less confidence
            y = torch.zeros(n, dtype=torch.long)
        else:
            f, y = torch.zeros(1, n, 1, dtype=torch.float64), error[:, None]
        x, new = f[:, :-1].transpose(0, 1), f[:, -1:].transpose(0, 1)
        for grouped in hits:
            options = {"groups": group[:-1]} if grouped else {}
            p = conformal(likelihood, (x, y[:-1]), 0.8, kind, **options).predict(new)
            if classify:
                hits[grouped] += bool(p.prediction_set()[0, 0])
            else:
                low, high = p.interval()
                hits[grouped] += bool(low[0, 0] <= y[-1, 0] <= high[0, 0])
    assert 0.8 - 0.092 < hits[True] / 300 < 0.8 + 1 / 21 + 0.092
    assert hits[False] / 300 < 0.8 - 0.092, "the large groups decide"


def test_groups_of_rows_are_for_rows_and_groups_of_mondrian_for_x() -> None:
    f = torch.zeros(30, 1, 1, dtype=torch.float64)
    y = torch.randn(30, 1, generator=rng(0), dtype=torch.float64)
    with pytest.raises(MethodError, match="a column of x or a function of x"):
        conformal(NUMBERS, (f, y), kind="mondrian", groups=list(range(30)))
    with pytest.raises(DataError, match="at row 3"):
        conformal(NUMBERS, (f, y), groups=[1, 2, 3, None] + [5] * 26)
    alone = conformal(NUMBERS, (f, y), groups=[f"person {i}" for i in range(30)])
    assert torch.equal(alone.transform.thresholds, conformal(NUMBERS, (f, y)).transform.thresholds)
