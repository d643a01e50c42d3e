"""Predictions have the shape of the y that was fitted to, whatever the likelihood and whatever is
done to the posterior since. Every method has this in tests/contract/test_predictive.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from likelihood_rows import outputs_of
from torch import Tensor, nn

import doxa
from doxa import decide, evaluate
from doxa.evaluate import conformal, recalibrate
from doxa.likelihoods import LIKELIHOODS

N = 30
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
NUMBERS = X.sum(1) + 0.1 * torch.randn(N, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(N, 2, generator=torch.Generator().manual_seed(2))
TARGETS = {
    name: (NUMBERS > 0).long() if kind.binary else NUMBERS.abs().round() if kind.counts else NUMBERS
    for name, kind in LIKELIHOODS.items()
    if not kind.class_axis
}
MOMENTS = ("mean", "variance", "std", "aleatoric", "epistemic", "expected_entropy")


def fit(y: Any, likelihood: Any = "gaussian", x: Any = X, **options: Any) -> Any:
    outputs = outputs_of(likelihood, 1)[0] if isinstance(likelihood, str) else 1
    net = doxa.nets.mlp(2, outputs, hidden=(4,))
    return doxa.fit(
        net, (x, y), "deep-ensemble", likelihood=likelihood, members=2, steps=3, progress=False,
        validation=None, **options,
    )  # fmt: skip


def check(posterior: Any, shape: tuple[int, ...], x: Tensor = X) -> None:
    p = posterior.predict(x)
    y = torch.zeros(shape)
    for name in MOMENTS:
        if hasattr(p, name):
            assert getattr(p, name).shape == shape, name
    assert p.targets(y).shape == shape
    assert p.sample(3).shape == (3, *shape)
    assert p.log_prob(y).shape == shape[:1]
    if p.likelihood.classifies:
        for name in ("probs", "entropy", "variation_ratio"):
            assert getattr(p, name).shape == shape, name
        assert p.prediction_set().shape == (shape[0], 2, *shape[1:])
        assert not hasattr(p, "samples") or p.votes().shape == shape
    else:
        assert p.quantile(0.5).shape == p.interval()[0].shape == p.cdf(y).shape == shape
    if hasattr(p, "samples"):
        assert p.samples.shape == (len(p.weights), *shape)
    assert posterior.functions(x, 2).shape == posterior.prior_functions(x, 2).shape == (2, *shape)


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_every_likelihood(name: str, standardize: bool) -> None:
    y = TARGETS[name]
    for given in (y, y[:, None]):
        posterior = fit(given, name, standardize=standardize)
        check(posterior, tuple(given.shape))
        check(posterior, (1, *given.shape[1:]), X[:1])
        p = posterior.predict(X)
        assert torch.equal(p.log_prob(y), p.log_prob(y[:, None]))


@pytest.mark.parametrize("name", TARGETS)
def test_the_shape_changes_no_number(name: str) -> None:
    flat, column = (fit(y, name).predict(X) for y in (TARGETS[name], TARGETS[name][:, None]))
    for quantity in (*MOMENTS, "samples"):
        assert torch.equal(getattr(flat, quantity).unsqueeze(-1), getattr(column, quantity))
    assert torch.equal(flat.sample(4).unsqueeze(-1), column.sample(4))


def test_corrected_mixed_and_saved(tmp_path: Path) -> None:
    posterior = fit(NUMBERS)
    yes = fit(TARGETS["bernoulli"], "bernoulli")
    made = {
        "split": conformal(posterior, (OTHER, NUMBERS)),
        "cqr": conformal(posterior, (OTHER, NUMBERS), kind="cqr"),
        "quantile": recalibrate(posterior, (OTHER, NUMBERS), "quantile"),
        "variance": recalibrate(posterior, (OTHER, NUMBERS), "variance"),
        "temperature": recalibrate(yes, (OTHER, TARGETS["bernoulli"])),
        "lac": conformal(yes, (OTHER, TARGETS["bernoulli"])),
        "mixture": doxa.MixturePosterior([posterior, fit(NUMBERS, seed=1)], [1.0, 2.0]),
    }
    for name, one in made.items():
        check(one, (N,))
        one.save(tmp_path / name)
        check(doxa.load(tmp_path / name), (N,))
    # Parts that disagree keep the outputs' own axis.
    check(doxa.MixturePosterior([posterior, fit(NUMBERS[:, None])], [1.0, 1.0]), (N, 1))


def test_a_coverage_is_that_of_rows_not_of_pairs() -> None:
    """By hand from the interval and y; against another axis it would be a mean over N² pairs."""
    p = conformal(fit(NUMBERS), (OTHER, NUMBERS)).predict(X)
    low, high = p.interval()
    by_hand = sum(a <= y <= b for a, y, b in zip(low, NUMBERS, high, strict=True)) / N
    assert evaluate.coverage(p, NUMBERS, 0.9) == pytest.approx(float(by_hand))
    squares = [(float(m) - float(y)) ** 2 for m, y in zip(p.mean, NUMBERS, strict=True)]
    assert evaluate.rmse(p, NUMBERS) == pytest.approx((sum(squares) / N) ** 0.5, rel=1e-5)


def test_an_older_artefact_has_the_outputs_axis(tmp_path: Path) -> None:
    from doxa import store

    fit(NUMBERS).save(tmp_path / "run")
    tensors, meta = store.read_artefact(tmp_path / "run")
    assert meta.pop("scalar_targets") is True and meta.pop("fitted_rows") == N
    del tensors["fitted_rows"]
    store.write_artefact(tmp_path / "old", tensors, json.loads(json.dumps(meta)))
    check(doxa.load(tmp_path / "old"), (N, 1))


def test_series_and_frames() -> None:
    series = pd.Series(NUMBERS.numpy(), name="y")
    check(fit(series), (N,))
    check(fit(series.to_frame()), (N, 1))


def test_heads_by_themselves(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x)[:, :1], self.layer(x)[:, 1:]

    posterior = doxa.fit(
        Both(), (X, (NUMBERS, NUMBERS[:, None])), "deep-ensemble", steps=2, members=2,
        likelihood=("gaussian", "gaussian"), progress=False,
    )  # fmt: skip
    posterior.save(tmp_path / "run")
    for one in (posterior, doxa.load(tmp_path / "run", net=Both())):
        first, second = one.predict(X).heads
        assert first.mean.shape == (N,) and second.mean.shape == (N, 1)
        first, second = one.predict(X, keep="moments").heads
        assert first.std.shape == (N,) and second.std.shape == (N, 1)


def test_conditioned_processes_keep_the_shape_and_the_columns() -> None:
    frame = pd.DataFrame(X.double().numpy(), columns=["a", "b"])
    for method in (doxa.GP(noise=0.1, refine=0), doxa.BayesianLinear(noise=0.1)):
        posterior = doxa.fit(None, (frame, NUMBERS.double()), method)
        more = posterior.condition(frame[["b", "a"]] + 1, NUMBERS.double()[:, None])
        assert more.columns == ["a", "b"]
        assert more.predict(frame).mean.shape == more.functions(frame, 2)[0].shape == (N,)


def test_what_is_drawn_for_decisions_has_one_number_per_row() -> None:
    process = doxa.fit(None, (X.double(), NUMBERS.double()), doxa.GP(noise=0.1, refine=0))
    column = doxa.fit(None, (X.double(), NUMBERS.double()[:, None]), doxa.GP(noise=0.1, refine=0))
    for score in (decide.bald, decide.predictive_variance, decide.mean_std):
        assert torch.equal(score(process.predict(OTHER)), score(column.predict(OTHER)))
    from doxa.decide.select import joint

    flat, wide = joint(process, OTHER), joint(column, OTHER)
    assert torch.equal(flat.samples.unsqueeze(-1), wide.samples)
    rows = [decide.batch_bald(p, 3).rows.tolist() for p in (flat, wide)]
    assert rows[0] == rows[1]
