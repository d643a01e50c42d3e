"""No likelihood given: it is inferred from y and the outputs and said, or asked for by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import doxa
from doxa.errors import MethodError, ModelError, ShapeError

N = 24
QUICK: dict[str, Any] = {"steps": 2, "progress": False}
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
CLASSES, YES_NO = torch.arange(N) % 3, torch.arange(N) % 2


def spoken(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings about the likelihood."""
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and "likelihood" in r.getMessage()
    ]


def plane(outputs: int) -> nn.Module:
    return nn.Linear(2, outputs)


def maps(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, outputs * 5), nn.Unflatten(1, (outputs, 5)))


INFERRED: dict[str, tuple[nn.Module, Any, str]] = {
    "classes": (plane(3), CLASSES, "categorical"),
    "two classes, two outputs": (plane(2), YES_NO, "categorical"),
    "small integers": (plane(3), CLASSES.to(torch.uint8), "categorical"),
    "an array": (plane(3), CLASSES.numpy().astype(np.int32), "categorical"),
    "a list": (plane(3), CLASSES.tolist(), "categorical"),
    "yes or no": (plane(1), YES_NO, "bernoulli"),
    "a column": (plane(1), YES_NO.unsqueeze(1), "bernoulli"),
    "truth values": (plane(1), YES_NO.bool(), "bernoulli"),
    "no axis of outputs": (nn.Sequential(plane(1), nn.Flatten(0)), YES_NO, "bernoulli"),
    "several labels": (plane(2), torch.stack([YES_NO, CLASSES.clamp_max(1)], 1), "bernoulli"),
    "a map": (maps(3), (torch.arange(N * 5) % 3).reshape(N, 5), "categorical"),
}


@pytest.mark.parametrize("name", INFERRED)
@pytest.mark.parametrize("as_model", [False, True])
def test_integer_labels_are_understood_and_said(
    name: str, as_model: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net, y, expected = INFERRED[name]
    posterior = doxa.fit(doxa.Model(net) if as_model else net, (X, y), "map", **QUICK)
    assert posterior.likelihood.name == expected
    (line,) = spoken(caplog)
    assert f'likelihood="{expected}"' in line
    assert posterior.metadata["likelihood"] in line
    assert expected in posterior.metadata["likelihood"]


def test_what_is_inferred_is_the_fit_that_was_meant(tmp_path: Path) -> None:
    net = doxa.nets.mlp(2, 3, hidden=(4,))
    given = doxa.fit(net, (X, CLASSES), "map", likelihood="categorical", **QUICK)
    inferred = doxa.fit(net, (X, CLASSES), "map", **QUICK)
    assert "likelihood.log_noise" not in inferred.layout.names
    assert torch.equal(inferred.predict(X).probs, given.predict(X).probs)
    inferred.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    assert torch.equal(again.predict(X).probs, given.predict(X).probs)
    assert again.metadata == inferred.metadata


def test_a_users_model_is_not_changed() -> None:
    model = doxa.Model(plane(3))
    doxa.fit(model, (X, CLASSES), doxa.MCDropout(insert="all"), **QUICK)
    assert model.likelihood == doxa.Gaussian()
    assert model.output is None
    again = doxa.fit(model, (X, X.new_ones(N, 3)), "map", **QUICK)
    assert again.likelihood == doxa.Gaussian()


ASSUMED: dict[str, tuple[int, Any]] = {
    "numbers": (1, X[:, 0]),
    "counts": (1, torch.arange(N)),
    "one value only": (1, torch.zeros(N, dtype=torch.long)),
    "floats that are whole": (1, torch.arange(N) % 3 + 0.0),
    "integers of the outputs' shape": (2, torch.arange(2 * N).reshape(N, 2)),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_what_may_be_a_number_is_a_number(name: str, caplog: pytest.LogCaptureFixture) -> None:
    outputs, y = ASSUMED[name]
    posterior = doxa.fit(plane(outputs), (X, y), "map", **QUICK)
    assert posterior.likelihood == doxa.Gaussian()
    assert not spoken(caplog)


DOUBTED: dict[str, tuple[int, Any, str]] = {
    "floats 0 and 1": (1, YES_NO.double(), 'likelihood="bernoulli"'),
    "a matrix of them": (2, torch.stack([YES_NO, YES_NO], 1).float(), 'likelihood="bernoulli"'),
    "one-hot floats": (3, torch.eye(3)[CLASSES], 'likelihood="categorical"'),
    "one-hot integers": (3, torch.eye(3, dtype=torch.long)[CLASSES], 'likelihood="categorical"'),
}


@pytest.mark.parametrize("name", DOUBTED)
def test_what_cannot_be_told_is_gaussian_with_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    outputs, y, named = DOUBTED[name]
    posterior = doxa.fit(plane(outputs), (X, y), "map", **QUICK)
    assert posterior.likelihood == doxa.Gaussian()
    (line,) = spoken(caplog)
    assert named in line
    assert 'likelihood="gaussian"' in line
    assert "gaussian" in posterior.metadata["likelihood"]


@pytest.mark.parametrize("data", ["numbers", "labels"])
def test_a_likelihood_that_is_given_is_taken(data: str, caplog: pytest.LogCaptureFixture) -> None:
    y = {"numbers": YES_NO.float(), "labels": YES_NO}[data]
    for model in (doxa.Model(plane(1), "gaussian"), doxa.Model(plane(1), doxa.Gaussian())):
        posterior = doxa.fit(model, (X, y), "map", **QUICK)
        assert posterior.likelihood == doxa.Gaussian()
    posterior = doxa.fit(plane(1), (X, y), "map", likelihood="gaussian", **QUICK)
    assert posterior.likelihood == doxa.Gaussian()
    assert not spoken(caplog)
    assert "likelihood" not in posterior.metadata


def test_a_grid_of_likelihoods_is_given_too(caplog: pytest.LogCaptureFixture) -> None:
    grid = {"likelihood": [doxa.Gaussian(), doxa.Gaussian()]}
    sweep = doxa.fit(plane(1), (X, YES_NO), "map", runs=doxa.Runs(grid=grid), **QUICK)
    assert sweep[0].likelihood == doxa.Gaussian()
    assert not spoken(caplog)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_class_numbers_as_floats_are_asked_about(kind: torch.dtype) -> None:
    with pytest.raises(ShapeError, match=r'3 outputs.*likelihood="categorical"'):
        doxa.fit(plane(3), (X, CLASSES.to(kind)), "map", **QUICK)


def test_numbers_that_are_no_classes_get_the_shape_that_is_needed() -> None:
    for y in (X[:, 0], torch.ones(N)):
        with pytest.raises(ShapeError, match=r"outputs of shape \[N, 3\] need"):
            doxa.fit(plane(3), (X, y), "map", **QUICK)
    with pytest.raises(ShapeError, match=r"need targets of shape \[N\]"):
        doxa.fit(plane(3), (X, CLASSES.unsqueeze(1)), "map", **QUICK)


def test_several_heads_need_their_likelihoods() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = plane(1), plane(3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x)

    with pytest.raises(ModelError, match=r'2 outputs.*likelihood=\("gaussian", "categorical"\)'):
        doxa.fit(TwoHeads(), (X, (X[:, :1], CLASSES)), "map", **QUICK)


def test_a_method_for_numbers_says_why_it_refuses_labels() -> None:
    with pytest.raises(MethodError, match=r'not bernoulli.*y holds.*likelihood="gaussian"'):
        doxa.fit(plane(1), (X, YES_NO), "linear", **QUICK)


@pytest.mark.parametrize("kind", ["dataset", "loader", "stream"])
def test_labels_of_a_dataset(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrapped(y: Tensor) -> Dataset[Any] | DataLoader[Any]:
        rows = TensorDataset(X, y)
        return DataLoader(rows, batch_size=8) if kind == "loader" else rows

    if kind == "stream":  # too large to be read at once: one row is at hand
        monkeypatch.setattr("doxa.data.rows.free_memory", lambda device="cpu": 64)
    assert doxa.fit(plane(3), wrapped(CLASSES), "map", **QUICK).likelihood.name == "categorical"
    caplog.clear()
    posterior = doxa.fit(plane(1), wrapped(YES_NO), "map", **QUICK)
    # One row does not show that all are 0 or 1, so that a stream stays Gaussian, and says so.
    assert posterior.likelihood.name == ("gaussian" if kind == "stream" else "bernoulli")
    (line,) = spoken(caplog)
    assert 'likelihood="bernoulli"' in line
