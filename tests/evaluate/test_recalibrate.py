"""Recalibrated classes against scipy, scikit-learn, and what cannot get worse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from given_posterior import GivenPosterior
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from doxa.errors import DataError, MethodError, ShapeError, Unavailable
from doxa.evaluate.recalibrate import recalibrate
from doxa.likelihoods import Bernoulli, Categorical, Gaussian, Heads, Poisson

KINDS = ("temperature", "vector", "dirichlet", "isotonic", "histogram")
CLASSES = GivenPosterior("categorical")


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(n: int, classes: int, draws: int = 1, seed: int = 0, scale: float = 1.0) -> Any:
    """Logits [n, draws, C] and labels drawn from their softmax over `scale`."""
    g = rng(seed)
    logits = 2.0 * torch.randn(n, draws, classes, generator=g, dtype=torch.float64)
    probs = torch.softmax(logits, 2).mean(1)
    y = torch.multinomial(probs, 1, generator=g).squeeze(1)
    y[:classes] = torch.arange(classes)  # every class occurs
    return scale * logits, y


def nll(posterior: Any, x: Tensor, y: Tensor) -> float:
    return -float(posterior.predict(x).log_prob(y).mean())


def log_probs(x: Tensor) -> np.ndarray[Any, Any]:
    """log of the averaged softmax, by scipy: [n, C]."""
    each = special.log_softmax(x.numpy(), axis=2)
    return special.logsumexp(each, axis=1) - np.log(x.shape[1])


@pytest.mark.parametrize(("classes", "draws"), [(2, 1), (3, 4), (10, 2)])
def test_temperature_is_the_minimum_that_scipy_finds(classes: int, draws: int) -> None:
    x, y = table(300, classes, draws, scale=2.5)
    z, label = log_probs(x), y.numpy()

    def loss(log_t: float) -> float:
        logits = z / np.exp(log_t)
        return float((special.logsumexp(logits, 1) - logits[np.arange(len(label)), label]).mean())

    best = optimize.minimize_scalar(loss, (-1.0, 3.0), method="brent", tol=1e-11)
    transform: Any = recalibrate(CLASSES, (x, y)).transform
    assert transform.temperature == pytest.approx(np.exp(best.x), rel=1e-6)
    assert loss(np.log(transform.temperature)) <= best.fun + 1e-14


@pytest.mark.parametrize("scale", [1.0, 3.0, 0.5])
def test_temperature_finds_by_how_much_logits_are_too_large(scale: float) -> None:
    """The model is true, so that 1/T has standard error 1 / sqrt(n E Var_p[z]); within 4 of them
    (one seed in 16,000 would fail)."""
    g = rng(1)
    logits = 2.0 * torch.randn(4000, 5, generator=g, dtype=torch.float64)
    probs = torch.softmax(logits, 1)
    y = torch.multinomial(probs, 1, generator=g).squeeze(1)
    transform: Any = recalibrate(CLASSES, (scale * logits.unsqueeze(1), y)).transform
    z = logits.log_softmax(1)
    information = ((probs * z.square()).sum(1) - (probs * z).sum(1).square()).sum()
    beta = scale / transform.temperature
    assert abs(beta - 1.0) < 4.0 / float(information.sqrt())


def test_dirichlet_is_multinomial_logistic_regression_on_log_probabilities() -> None:
    x, y = table(400, 4, 3, scale=2.0)
    z = log_probs(x)
    peer = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(z, y.numpy())
    want = -peer.predict_log_proba(z)[np.arange(400), y.numpy()].mean()
    posterior = recalibrate(CLASSES, (x, y), "dirichlet")
    assert nll(posterior, x, y) == pytest.approx(want, abs=1e-6)
    probs = posterior.predict(x).probs.numpy()
    np.testing.assert_allclose(probs, peer.predict_proba(z), atol=2e-4)


def test_odir_regularisation_is_the_minimum_that_scipy_finds() -> None:
    x, y = table(120, 3, 1, scale=2.0)
    z, label, k = log_probs(x), y.numpy(), 3

    def loss(theta: np.ndarray[Any, Any]) -> float:
        w, b = theta[: k * k].reshape(k, k), theta[k * k :]
        logits = z @ w.T + b
        fit = (special.logsumexp(logits, 1) - logits[np.arange(len(label)), label]).mean()
        off = w - np.diag(np.diag(w))
        return float(fit + 0.7 * (off**2).sum() / (k * (k - 1)) + 0.3 * (b**2).sum() / k)

    start = np.concatenate([np.eye(k).ravel(), np.zeros(k)])
    best = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-8})
    posterior = recalibrate(CLASSES, (x, y), "dirichlet", off_diagonal=0.7, intercept=0.3)
    own: Any = posterior.transform
    got = loss(np.concatenate([own.matrix.numpy().ravel(), own.bias.numpy()]))
    assert got == pytest.approx(best.fun, abs=1e-8)
    np.testing.assert_allclose(own.bias.numpy(), best.x[k * k :], atol=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("kind", ["vector", "dirichlet"])
def test_never_worse_than_the_frequencies_of_the_classes(kind: str, scale: float) -> None:
    """They are a = 0, or W = 0, with b their logarithms: the optimum is no worse."""
    x, _ = table(60, 4, 1, scale=scale)
    y = torch.arange(60) % 4
    frequencies = math.log(4)
    assert nll(recalibrate(CLASSES, (x, y), kind), x, y) <= frequencies + 1e-9


@pytest.mark.parametrize("kind", ["vector", "dirichlet"])
def test_separable_and_few_rows(kind: str) -> None:
    """The loss falls towards 0 without an end: the result is finite, and close to it."""
    y = torch.arange(40) % 4
    x = torch.eye(4).double()[y].unsqueeze(1)
    for n in (4, 40):  # one row of each class, and ten
        posterior = recalibrate(CLASSES, (x[:n], y[:n]), kind)
        own: Any = posterior.transform
        assert all(bool(torch.isfinite(value).all()) for value in vars(own).values())
        assert nll(posterior, x, y) < 1e-8


def test_vector_scaling_of_two_classes_is_logistic_regression() -> None:
    """a1 z1 - a0 z0 + b: a regression on both log-probabilities."""
    x, y = table(300, 2, 2, scale=0.6)
    z = log_probs(x)
    peer = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(z, y.numpy())
    want = -peer.predict_log_proba(z)[np.arange(300), y.numpy()].mean()
    assert nll(recalibrate(CLASSES, (x, y), "vector"), x, y) == pytest.approx(want, abs=1e-6)


def test_vector_scaling_of_many_classes_is_the_minimum_that_scipy_finds() -> None:
    x, y = table(300, 5, 1, scale=3.0)
    z, label = log_probs(x), y.numpy()

    def loss(theta: np.ndarray[Any, Any]) -> float:
        logits = z * theta[:5] + theta[5:]
        return float((special.logsumexp(logits, 1) - logits[np.arange(len(label)), label]).mean())

    best = optimize.minimize(loss, np.repeat([1.0, 0.0], 5), method="BFGS", options={"gtol": 1e-9})
    assert nll(recalibrate(CLASSES, (x, y), "vector"), x, y) == pytest.approx(best.fun, abs=1e-8)


@pytest.mark.parametrize("decimals", [None, 0])  # with and without ties
def test_isotonic_is_scikit_learns(decimals: int | None) -> None:
    x, y = table(200, 2, 1, scale=2.0)
    if decimals is not None:
        x = x.round(decimals=decimals)
    score = np.exp(log_probs(x)[:, 1])
    peer = IsotonicRegression(out_of_bounds="clip").fit(score, y.numpy())
    posterior = recalibrate(CLASSES, (x, y), "isotonic")
    new, _ = table(500, 2, 1, seed=5, scale=3.0)
    for at in (x, new):
        got = posterior.predict(at).probs[:, 1].numpy()
        np.testing.assert_allclose(got, peer.predict(np.exp(log_probs(at)[:, 1])), atol=1e-12)


def test_isotonic_of_many_classes_is_one_against_the_rest_normalised() -> None:
    x, y = table(200, 4, 2)
    probs = np.exp(log_probs(x))
    each = np.stack(
        [IsotonicRegression().fit_transform(probs[:, c], (y == c).numpy()) for c in range(4)], 1
    )
    got = recalibrate(CLASSES, (x, y), "isotonic").predict(x).probs.numpy()
    np.testing.assert_allclose(got, each / each.sum(1, keepdims=True), atol=1e-12)


@pytest.mark.parametrize("equal_mass", [False, True])
def test_histogram_gives_the_share_of_each_bin(equal_mass: bool) -> None:
    x, y = table(200, 2, 1)
    probs = np.exp(log_probs(x)[:, 1])
    inner = np.arange(1, 5) / 5
    if equal_mass:
        inner = np.sort(probs)[[40, 80, 120, 160]]
    want = np.empty(200)
    for i, p in enumerate(probs):
        mates = [np.sum(inner <= q) == np.sum(inner <= p) for q in probs]
        want[i] = y.numpy()[mates].mean()
    posterior = recalibrate(CLASSES, (x, y), "histogram", bins=5, equal_mass=equal_mass)
    np.testing.assert_allclose(posterior.predict(x).probs[:, 1].numpy(), want, atol=1e-12)


def test_probabilities_in_an_empty_bin_stay_as_they_are() -> None:
    probs = torch.tensor([0.05, 0.07, 0.95, 0.97]).double()
    x = torch.stack([1 - probs, probs], 1).log().unsqueeze(1)
    posterior = recalibrate(CLASSES, (x, torch.tensor([0, 1, 1, 1])), "histogram", bins=10)
    new = torch.tensor([0.09, 0.33, 0.93]).double()
    at = torch.stack([1 - new, new], 1).log().unsqueeze(1)
    got = posterior.predict(at).probs[:, 1]
    torch.testing.assert_close(got, torch.tensor([0.5, 0.33, 1.0]).double())


def test_a_row_to_which_every_curve_gives_nothing_keeps_its_probabilities() -> None:
    """Below one half no class was ever right: the curves are 0 there, and so is their sum."""
    y = torch.arange(30) % 3
    probs = torch.stack([torch.tensor([0.54, 0.45, 0.01]).double().roll(int(c)) for c in y])
    new = torch.tensor([[0.4, 0.35, 0.25], [0.8, 0.1, 0.1]]).double()
    options: dict[str, dict[str, Any]] = {"isotonic": {}, "histogram": {"bins": 2}}
    for kind, own in options.items():
        posterior = recalibrate(CLASSES, (probs.log().unsqueeze(1), y), kind, **own)
        got = posterior.predict(new.log().unsqueeze(1)).probs
        torch.testing.assert_close(got[0], new[0] / new[0].sum())
        torch.testing.assert_close(got[1], torch.tensor([1.0, 0.0, 0.0]).double())


@st.composite
def tables(draw: Any) -> tuple[Tensor, Tensor]:
    """Logits and labels: ordinary, extreme, constant, separable, wrong everywhere."""
    classes = draw(st.integers(2, 5))
    n = draw(st.integers(classes, 40))
    g = rng(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
    draws = draw(st.integers(1, 3))
    logits = scale * torch.randn(n, draws, classes, generator=g, dtype=torch.float64)
    if draw(st.booleans()):
        logits = logits.round(decimals=0)  # ties
    how = draw(st.sampled_from(["random", "separable", "wrong"]))
    y = torch.randint(classes, (n,), generator=g)
    if how != "random":
        y[:classes] = torch.arange(classes)
        ahead = torch.zeros(n, 1, classes, dtype=torch.float64)
        ahead.scatter_(2, y.reshape(-1, 1, 1), 10.0 * scale if how == "separable" else -10 * scale)
        logits = logits + ahead
    y[:classes] = torch.arange(classes)
    return logits, y


@pytest.mark.slow
@given(tables(), st.sampled_from(["temperature", "vector", "dirichlet", "isotonic"]))
@settings(max_examples=150, deadline=None)
def test_the_rows_it_was_fitted_to_never_get_worse(rows: tuple[Tensor, Tensor], kind: str) -> None:
    x, y = rows
    if kind == "isotonic" and x.shape[2] > 2:
        kind = "temperature"  # more than two curves carry no guarantee
    before, after = nll(CLASSES, x, y), nll(recalibrate(CLASSES, (x, y), kind), x, y)
    assert np.isfinite(after)
    assert after <= before + 1e-9 * (1.0 + before)


@pytest.mark.slow
@given(tables(), st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
def test_parts_add_up_and_probabilities_are_a_distribution(
    rows: tuple[Tensor, Tensor], kind: str
) -> None:
    x, y = rows
    posterior = recalibrate(CLASSES, (x, y), kind)
    for keep in ("samples", "moments"):
        p = posterior.predict(x, keep=keep)
        torch.testing.assert_close(p.probs.sum(1), torch.ones(len(x)).double())
        assert bool((p.probs >= 0).all())
        assert bool((p.mutual_information >= 0).all())
        assert bool((p.mutual_information <= p.entropy + 1e-12).all())
        want = -special.xlogy(p.probs.numpy(), p.probs.numpy()).sum(1)
        np.testing.assert_allclose(p.entropy.numpy(), want, atol=1e-12)
        torch.testing.assert_close(p.aleatoric + p.epistemic, p.variance)
        torch.testing.assert_close(p.variance, p.probs * (1.0 - p.probs))
        assert bool((p.epistemic >= 0).all())


def test_the_split_keeps_the_proportions_of_the_base() -> None:
    x, y = table(50, 3, 4, scale=3.0)
    p, q = recalibrate(CLASSES, (x, y)).predict(x), CLASSES.predict(x)
    torch.testing.assert_close(p.mutual_information / p.entropy, q.mutual_information / q.entropy)
    torch.testing.assert_close(p.epistemic / p.variance, q.epistemic / q.variance)
    assert bool((p.entropy > q.entropy).all())  # logits were too large


def test_bernoulli_is_two_classes() -> None:
    """sigmoid(f) is the softmax of (0, f): the same temperature, curve and matrix."""
    x, y = table(150, 2, 3, scale=2.0)
    logit = (x[:, :, 1] - x[:, :, 0]).unsqueeze(2)  # [n, S, 1]
    yes = GivenPosterior(Bernoulli())
    for kind in KINDS:
        want = recalibrate(CLASSES, (x, y), kind).predict(x)
        p = recalibrate(yes, (logit, y), kind).predict(logit)
        torch.testing.assert_close(p.probs, want.probs[:, 1:], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(p.log_prob(y), want.log_prob(y), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(p.entropy[:, 0], want.entropy, rtol=1e-6, atol=1e-8)
        assert p.prediction_set(0.8).shape == (150, 2, 1)


def test_sites_share_parameters_and_ignored_labels_count_nothing() -> None:
    x, y = table(60, 3, 2, scale=2.0)
    pixels = x.reshape(10, 6, 2, 3).permute(0, 2, 3, 1)  # [10, S, C, 6 sites]
    labels = y.reshape(10, 6).clone()
    labels[3, 2] = -1
    kept = torch.arange(60) != 3 * 6 + 2
    segments = GivenPosterior(Categorical(ignore_index=-1))
    for kind in KINDS:
        flat = recalibrate(CLASSES, (x[kept], y[kept]), kind).predict(x)
        p = recalibrate(segments, (pixels, labels), kind).predict(pixels)
        torch.testing.assert_close(p.probs, flat.probs.reshape(10, 6, 3).movedim(1, 2))
        each = flat.log_prob(y)
        each[18 + 2] = 0.0
        torch.testing.assert_close(p.log_prob(labels), each.reshape(10, 6).sum(1))


def test_samples_follow_the_probabilities() -> None:
    """4,000 draws of 12 shares: 4.5 standard errors each (false-failure rate 1e-4)."""
    x, y = table(50, 3, 2, scale=2.0)
    p = recalibrate(CLASSES, (x, y)).predict(x[:4])
    shares = torch.nn.functional.one_hot(p.sample(4000, seed=1), 3).double().mean(0)
    assert bool(((shares - p.probs).abs() < 4.5 * (p.variance / 4000).sqrt()).all())


def test_draws_are_those_of_the_base() -> None:
    x, y = table(50, 3, 2)
    p = recalibrate(CLASSES, (x, y)).predict(x)
    for quantity in ("samples", "weights"):
        with pytest.raises(Unavailable, match=r"posterior\.base"):
            getattr(p, quantity)
    with pytest.raises(Unavailable, match="averaged"):
        p.votes()


def test_recalibrating_twice_changes_nothing_more() -> None:
    x, y = table(200, 3, 2, scale=3.0)
    once = recalibrate(CLASSES, (x, y))
    twice: Any = recalibrate(once, (x, y))
    assert twice.transform.temperature == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(twice.predict(x).probs, once.predict(x).probs)


def test_single_precision_agrees_with_double() -> None:
    x, y = table(100, 3, 2, scale=2.0)
    for kind in KINDS:
        p = recalibrate(CLASSES, (x.float(), y), kind).predict(x.float())
        q = recalibrate(CLASSES, (x, y), kind).predict(x)
        assert p.probs.dtype == p.log_prob(y).dtype == p.entropy.dtype == torch.float32
        torch.testing.assert_close(p.probs.double(), q.probs, rtol=1e-4, atol=1e-4)


def test_ends_of_the_temperature_range() -> None:
    x, _ = table(40, 3, 1)
    right = recalibrate(CLASSES, (x, x[:, 0].argmax(1))).transform
    wrong = recalibrate(CLASSES, (x, x[:, 0].argmin(1))).transform
    flat = recalibrate(CLASSES, (torch.zeros_like(x), x[:, 0].argmax(1))).transform
    ends = [t.temperature for t in (right, wrong, flat)]  # type: ignore[attr-defined]
    np.testing.assert_allclose(ends, [0.01, 1e8, 1.0])


def test_bad_input_is_named() -> None:
    x, y = table(30, 3)
    numbers, counts = GivenPosterior(Gaussian(noise=1.0)), GivenPosterior(Poisson())
    with pytest.raises(MethodError, match="did you mean 'temperature'"):
        recalibrate(CLASSES, (x, y), "temprature")
    with pytest.raises(MethodError, match=r"gaussian; for it there are: quantile, variance"):
        recalibrate(numbers, (x[:, :, :1], y.double()))
    with pytest.raises(MethodError, match=r"categorical; for it there are: temperature, vector"):
        recalibrate(CLASSES, (x, y), "quantile")
    with pytest.raises(MethodError, match="counts"):
        recalibrate(counts, (x[:, :, :1], y), "quantile")
    with pytest.raises(MethodError, match="2 heads"):
        recalibrate(GivenPosterior(Heads((Categorical(), Categorical()))), (x, y))
    with pytest.raises(MethodError, match="no option 'bin'; did you mean 'bins'"):
        recalibrate(CLASSES, (x, y), "histogram", bin=3)
    with pytest.raises(MethodError, match="bins must be a whole number"):
        recalibrate(CLASSES, (x, y), "histogram", bins=0)
    with pytest.raises(MethodError, match="off_diagonal"):
        recalibrate(CLASSES, (x, y), "dirichlet", off_diagonal=-1.0)
    with pytest.raises(MethodError, match="floor"):
        recalibrate(CLASSES, (x, y), "isotonic", floor=0.7)
    with pytest.raises(DataError, match="pair"):
        recalibrate(CLASSES, x)
    with pytest.raises(DataError, match="row 0 is not a class"):
        recalibrate(CLASSES, (x, y + 3))
    with pytest.raises(ShapeError, match="29 targets for predictions at 30 rows"):
        recalibrate(CLASSES, (x, y[1:]))
    broken = x.clone()
    broken[7] = torch.nan
    with pytest.raises(DataError, match="row 7 is not finite"):
        recalibrate(CLASSES, (broken, y))
    ignoring = GivenPosterior(Categorical(ignore_index=0))
    with pytest.raises(DataError, match="every calibration label is ignored"):
        recalibrate(ignoring, (x, torch.zeros_like(y)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_class_only(kind: str) -> None:
    """One parameter can be fitted to them; one for each class would drive the others out."""
    x, y = table(30, 3)
    y = torch.ones_like(y)
    if kind == "temperature":
        posterior = recalibrate(CLASSES, (x, y), kind)
        assert nll(posterior, x, y) <= nll(CLASSES, x, y)
        return
    with pytest.raises(DataError, match=r"no calibration row is of class 0, 2: .*temperature"):
        recalibrate(CLASSES, (x, y), kind)


def test_a_floor_keeps_probabilities_away_from_zero_and_one() -> None:
    x, _ = table(60, 2)
    p = recalibrate(CLASSES, (x, x[:, 0].argmax(1)), "isotonic", floor=0.01).predict(x)
    torch.testing.assert_close(p.probs.amin(1), torch.full((60,), 0.01).double())
