"""What `predict` gives: shapes, types, units, and a decomposition that adds up."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa
from doxa.errors import DataError, MethodError, Unavailable
from doxa.predictive.classes import Odds

Check = Callable[..., None]
DTYPES = [torch.float32, torch.float64]
NEW = 9


def new_x() -> Tensor:
    g = torch.Generator().manual_seed(3)
    return 2.4 * torch.rand(NEW, 2, generator=g, dtype=torch.float64) - 1.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_types(case: Any, dtype: torch.dtype) -> None:
    posterior = case.posterior(dtype)
    p, x = posterior.predict(new_x()), new_x()
    event, table = (), () if case.regression else (3,)

    def check(value: Tensor, *shape: int) -> None:
        assert value.shape == shape
        assert value.dtype == dtype
        assert value.device.type == case.device
        assert torch.isfinite(value).all()

    for name in ("mean", "variance", "std", "aleatoric", "epistemic"):
        check(getattr(p, name), NEW, *table)
    check(p.expected_entropy, NEW, *event)
    y = torch.zeros(NEW) if case.regression else torch.zeros(NEW, dtype=torch.long)
    check(p.log_prob(y), NEW)
    check(p.weights, len(p.weights))
    assert float(p.weights.sum()) == pytest.approx(1.0, abs=1e-5)
    if case.regression:
        check(p.quantile(0.9), NEW)
        check(p.quantile([0.1, 0.5, 0.9]), 3, NEW)
        check(p.interval(0.5)[1], NEW)
        check(p.cdf(p.mean), NEW)
        check(p.sample(4), 4, NEW)
        check(p.moment_matched().variance, NEW)
        for name in ("probs", "variation_ratio"):
            with pytest.raises(Unavailable):
                getattr(p, name)
    else:
        check(p.probs, NEW, 3)
        check(p.votes(), NEW, 3)
        for name in ("entropy", "mutual_information", "variation_ratio"):
            check(getattr(p, name), NEW)
        classes = p.sample(4)
        assert classes.shape == (4, NEW)
        assert classes.dtype == torch.int64
        for call in (lambda: p.quantile(0.5), lambda: p.interval(), lambda: p.moment_matched()):
            with pytest.raises(Unavailable):
                call()
    count = case.posterior().members if posterior.kind == "sample" else 5
    check(posterior.functions(x, count), count, NEW, *table)
    if hasattr(p, "samples"):
        check(p.samples, len(p.weights), NEW, *table)


@pytest.mark.parametrize("column", [False, True], ids=["y [N]", "y [N, 1]"])
def test_predictions_have_the_shape_of_y(regression: Any, column: bool, tmp_path: Path) -> None:
    """Else p.mean - y would be [N, N], without an error."""
    x, y = regression.data()
    y = y[:, None] if column else y
    posterior = regression.fit((x, y), steps=2) if column else regression.posterior()
    posterior.save(tmp_path / "run")
    for one in (posterior, doxa.load(tmp_path / "run", device=regression.device)):
        p = one.predict(x)
        assert (p.mean.cpu() - y).shape == y.shape
        for name in ("mean", "variance", "std", "aleatoric", "epistemic", "expected_entropy"):
            assert getattr(p, name).shape == y.shape, name
            assert getattr(one.predict(x, keep="moments"), name).shape == y.shape, name
        assert p.quantile(0.9).shape == p.cdf(y).shape == p.targets(y).shape == y.shape
        assert [bound.shape for bound in p.interval(0.9)] == [y.shape] * 2
        assert p.moment_matched().mean.shape == y.shape
        assert p.quantile([0.1, 0.5]).shape == p.sample(2).shape == (2, *y.shape)
        assert one.functions(x, 1).shape == (1, *y.shape)
        assert one.functions(x[:1], 1).shape == (1, 1, *y.shape[1:])
        assert not hasattr(p, "samples") or p.samples.shape[1:] == y.shape
        both = (y.reshape(-1), y.reshape(-1, 1))
        assert torch.equal(*(p.log_prob(given) for given in both))


def test_the_answer_follows_the_posteriors_type_not_the_inputs(case: Any) -> None:
    posterior, x = case.posterior(), new_x()
    exact, cast = posterior.predict(x), posterior.predict(x.float())
    assert exact.mean.dtype == cast.mean.dtype == torch.float32
    assert torch.allclose(exact.mean, cast.mean, rtol=1e-4, atol=1e-5)


def test_variance_adds_up(case: Any) -> None:
    p = case.posterior(torch.float64).predict(new_x())
    assert torch.equal(p.aleatoric + p.epistemic, p.variance)
    assert torch.allclose(p.std.square(), p.variance)
    assert (p.aleatoric > 0).all()
    assert (p.epistemic >= 0).all()
    if case.regression and hasattr(p, "samples"):
        w = p.weights[:, None]
        mean = (w * p.samples).sum(0)
        assert torch.allclose(p.mean, mean, rtol=1e-10)
        spread = (w * (p.samples - mean).square()).sum(0)
        assert torch.allclose(p.epistemic, spread, rtol=1e-8, atol=1e-12)
    if not case.regression:  # Σ_c Var[y_c] of a one-hot y is one minus its squared probabilities
        assert torch.allclose(p.variance, p.probs * (1 - p.probs), atol=1e-12)


def test_entropy_adds_up(classification: Any) -> None:
    p = classification.posterior(torch.float64).predict(new_x())
    by_hand = -(p.probs * p.probs.log()).sum(1)
    each = torch.softmax(p.samples, 2)
    expected = (p.weights[:, None] * -(each * each.log()).sum(2)).sum(0)
    assert torch.allclose(p.probs.sum(1), torch.ones(NEW, device=p.probs.device).double())
    average = (p.weights[:, None, None] * each).sum(0)
    assert torch.allclose(p.entropy, by_hand, atol=1e-10)
    if isinstance(p.form, Odds):  # the integral that the average is an estimate of
        assert ((p.probs - average).abs() <= 7 * each.std(0) / math.sqrt(len(each))).all()
        assert torch.allclose(p.expected_entropy, expected, rtol=0.05)
    else:
        assert torch.allclose(p.probs, average, atol=1e-12)
        assert torch.allclose(p.expected_entropy, expected, atol=1e-10)
    assert torch.allclose(p.entropy, p.expected_entropy + p.mutual_information)
    assert (p.mutual_information >= 0).all()
    assert (p.mutual_information <= p.entropy).all()
    assert (p.entropy <= math.log(3) + 1e-9).all()
    assert torch.allclose(p.variation_ratio, 1 - p.probs.amax(1))


def test_draws_of_y_have_the_moments_that_are_reported(case: Any) -> None:
    """Seven standard errors: with 18 to 54 numbers a case it fails by chance once in 10⁹."""
    draws = 20_000
    p = case.posterior(torch.float64).predict(new_x())
    y = p.sample(draws, seed=1)
    if not case.regression:
        y = torch.nn.functional.one_hot(y, 3).double()
    error = (p.variance / draws).sqrt()
    assert ((y.mean(0) - p.mean).abs() <= 7 * error + 1e-9).all()
    if case.regression:
        fourth = (y - p.mean).pow(4).mean(0)
        error = ((fourth - p.variance.square()) / draws).sqrt()
        assert ((y.var(0) - p.variance).abs() <= 7 * error).all()
        inside = (y <= p.quantile(0.8)).double().mean(0)
        assert ((inside - 0.8).abs() <= 7 * math.sqrt(0.16 / draws)).all()


def test_one_row(case: Any, answers: Any, assert_close: Check) -> None:
    posterior, x = case.posterior(torch.float64), new_x()
    y = torch.ones(NEW).double() if case.regression else torch.ones(NEW, dtype=torch.long)
    whole, one = answers(posterior.predict(x), y), answers(posterior.predict(x[4:5]), y[4:5])
    rows = {name: v[:, 4:5] if name == "samples" else v[4:5] for name, v in whole.items()}
    assert_close(one, rows, 1e-9)


def test_a_sample_is_one_function_at_all_rows(case: Any, assert_close: Check) -> None:
    """Rows do not know of each other: their order changes nothing but the order."""
    posterior, x = case.posterior(torch.float64), new_x()
    order = torch.randperm(NEW, generator=torch.Generator().manual_seed(0))
    p, shuffled = posterior.predict(x), posterior.predict(x[order])
    assert_close({"mean": shuffled.mean}, {"mean": p.mean[order]}, 1e-9)
    if hasattr(p, "samples"):
        assert_close({"f": shuffled.samples}, {"f": p.samples[:, order]}, 1e-9)


def test_repeated_calls_agree_and_seeds_differ(case: Any) -> None:
    posterior, x = case.posterior(), new_x()
    first = posterior.predict(x)
    assert torch.equal(first.mean, posterior.predict(x).mean)
    assert torch.equal(first.sample(3), posterior.predict(x).sample(3))
    assert not torch.equal(first.sample(3, seed=1), first.sample(3, seed=2))
    if hasattr(first, "samples"):
        same = torch.equal(first.samples, posterior.predict(x, seed=1).samples)
        assert same == (posterior.kind == "sample")  # kept draws are not drawn again


def test_n_is_the_number_of_samples_in_all(case: Any) -> None:
    posterior, x = case.posterior(), new_x()
    kept = posterior.kind == "sample"
    total = posterior.samples.shape[0] * posterior.samples.shape[1] if kept else 100
    p = posterior.predict(x)
    if hasattr(p, "samples"):
        assert len(p.samples) == total
        few = min(7, total)
        assert len(posterior.predict(x, n=few).samples) == few
    if kept:
        with pytest.raises(MethodError, match=f"{total + 1} draws requested, but {total} are kept"):
            posterior.predict(x, n=total + 1)
    for n in (0, -1):
        with pytest.raises(MethodError, match="at least 1"):
            posterior.predict(x, n=n)
    with pytest.raises(MethodError, match="keep"):
        posterior.predict(x, keep="everything")
    with pytest.raises(DataError, match="no rows"):
        posterior.predict(x[:0])


def test_functions_are_the_samples_of_predict(case: Any) -> None:
    posterior, x = case.posterior(), new_x()
    n = min(6, posterior.samples.shape[:2].numel()) if posterior.kind == "sample" else 6
    p = posterior.predict(x, n=n, seed=4)
    f = posterior.functions(x, n, seed=4)
    assert f.shape[:2] == (n, NEW)
    if hasattr(p, "samples"):
        assert torch.equal(f, p.samples)
    elif posterior.kind != "sample":
        assert not torch.equal(f, posterior.functions(x, n, seed=5))


def test_draws_are_named_parameters(case: Any) -> None:
    posterior = case.posterior()
    try:
        draws = posterior.draw(1)
    except Unavailable as reason:
        assert posterior.kind not in ("sample", "gaussian"), reason
        return
    assert all(len(value) == 1 for value in draws.values())
    if case.trains:
        net = posterior.model.net if case.cls.own_weights else case.net()
        shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
        assert {name: tuple(v.shape[1:]) for name, v in draws.items() if name in shapes} == shapes


@pytest.mark.by_family
def test_streamed_moments_are_the_samples_moments(
    case: Any, answers: Any, assert_close: Check
) -> None:
    posterior, x = case.posterior(torch.float64), new_x()
    kept, streamed = (answers(posterior.predict(x, keep=k)) for k in ("samples", "moments"))
    had_samples = kept.pop("samples", None) is not None
    if had_samples:
        assert "samples" not in streamed
    streamed.pop("samples", None)
    assert_close(streamed, kept, 1e-9)


def test_units_of_y(regression: Any, assert_close: Check) -> None:
    """y → 10 y + 3 is the same fit when targets are standardised: everything scales with it,
    densities lose log 10 a row."""
    x, y = regression.data()
    options = {"dtype": torch.float64, "steps": 20}
    one, ten = regression.fit((x, y), **options), regression.fit((x, 10 * y + 3), **options)
    p, q = one.predict(x), ten.predict(x)
    assert_close({"mean": q.mean}, {"mean": 10 * p.mean + 3}, 1e-7)
    assert_close({"std": q.std}, {"std": 10 * p.std}, 1e-7)
    shift = p.log_prob(y) - math.log(10)
    assert_close({"log_prob": q.log_prob(10 * y + 3)}, {"log_prob": shift}, 1e-7)
    for name in ("log_evidence", "elbo"):
        before, after = getattr(one, name), getattr(ten, name)
        assert (before is None) == (after is None)
        if before is not None:
            assert after == pytest.approx(before - len(y) * math.log(10), rel=1e-7)


def test_a_given_noise_is_in_units_of_y(regression: Any) -> None:
    p = regression.fit(likelihood=doxa.Gaussian(noise=2.5), steps=10).predict(new_x())
    assert torch.allclose(p.aleatoric.cpu().double(), torch.tensor(2.5**2).double(), rtol=1e-5)
