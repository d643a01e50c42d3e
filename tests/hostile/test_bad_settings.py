"""Settings out of range or misspelt: an error that names the setting, before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import DataError, DoxaError, MethodError, ModelError

N, D = 12, 2


def table() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def mlp() -> nn.Module:
    return doxa.nets.mlp(D, 1, hidden=(3,))


SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"members": 0}, MethodError, "members"),
    ({"members": -1}, MethodError, "members"),
    ({"members": 2.5}, MethodError, "members"),
    ({"members": [0, 0]}, MethodError, "distinct"),
    ({"members": []}, MethodError, "members"),
    ({"members": [0.5]}, MethodError, "member"),
    ({"steps": 0}, MethodError, "steps"),
    ({"steps": -3}, MethodError, "steps"),
    ({"steps": 2.5}, MethodError, "steps"),
    ({"steps": "many"}, MethodError, "steps"),
    ({"epochs": 0}, MethodError, "epochs"),
    ({"epochs": float("nan")}, MethodError, "epochs"),
    ({"epochs": 1, "steps": 5}, MethodError, "not both"),
    ({"batch_size": 0}, MethodError, "batch_size"),
    ({"batch_size": -4}, MethodError, "batch_size"),
    ({"batch_size": 1.5}, MethodError, "batch_size"),
    ({"lr": 0.0}, MethodError, "lr"),
    ({"lr": -1e-3}, MethodError, "lr"),
    ({"lr": float("nan")}, MethodError, "lr"),
    ({"lr": "fast"}, MethodError, "lr"),
    ({"patience": 0, "validation": 0.5}, MethodError, "patience"),
    ({"validation": 1.5}, DataError, "validation=1.5"),
    ({"validation": 1.0}, DataError, "leaves 0 to train"),
    ({"validation": 0.001}, DataError, "0 to validate"),
    ({"validation": 0.0}, MethodError, "validation"),
    ({"validation": -0.2}, MethodError, "validation"),
    ({"validation": "some"}, MethodError, "validation"),
    ({"init": "zero"}, MethodError, "'fresh' or 'given'"),
    ({"engine": "rocket"}, MethodError, "'stack' or 'loop', not 'rocket'"),
    ({"engine": "stack:rocket"}, MethodError, "'rocket'"),
    ({"engine": 3}, MethodError, "engine"),
    ({"schedule": "exponential"}, MethodError, "schedule"),
    ({"optimizer": "adagrad"}, MethodError, "optimizer"),
    ({"optimizer": torch.optim.Adam}, MethodError, "optimizer"),
    ({"device": "gpu"}, MethodError, "device 'gpu'"),
    ({"device": "meta"}, MethodError, "meta"),
    ({"dtype": torch.int64}, MethodError, "floating"),
    ({"likelihood": "gausian"}, ModelError, "gaussian"),
    ({"likelihood": 3}, ModelError, "likelihood"),
    ({"prior": "flat"}, ModelError, "flat"),
    ({"prior": {"nowhere.*": doxa.Normal()}}, ModelError, "matches no parameter"),
    ({"subset": "first_layer", "method": "mean-field"}, ModelError, "first_layer"),
    ({"subset": lambda name: False, "method": "mean-field"}, ModelError, "selects no trainable"),
    ({"method": "deep-ensembel"}, MethodError, "did you mean 'deep-ensemble'"),
    ({"method": "quantum"}, MethodError, "known: .*gp.*list all"),
    ({"method": 3}, MethodError, "method"),
    ({"method": dict}, MethodError, "method"),
]


def name(settings: dict[str, Any]) -> str:
    """The same in every worker: a function has no address in it."""
    shown = (f"{k}={'a function' if callable(v) else v}" for k, v in settings.items())
    return ", ".join(shown)


@pytest.mark.parametrize(
    "settings, error, message", SETTINGS, ids=lambda v: name(v) if isinstance(v, dict) else ""
)
def test_bad_settings_are_named(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = dict(settings)
    method = given.pop("method", "map")
    if "epochs" not in given:
        given.setdefault("steps", 3)
    with pytest.raises(error, match=message):
        doxa.fit(mlp(), table(), method, **given)


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("HMC", {"draws": 0}), ("HMC", {"leapfrog": 0}), ("HMC", {"burn_in": -1}), ("HMC", {"thin": 0}),
    ("HMC", {"target_accept": 1.0}), ("HMC", {"temperature": 0.0}), ("HMC", {"temperature": -1.0}),
    ("MeanField", {"initial_std": 0.0}), ("MeanField", {"temperature": -1.0}),
    ("MeanField", {"average": 1.0}), ("MCDropout", {"p": 0.0}), ("MCDropout", {"p": 1.0}),
    ("MCDropout", {"insert": "somewhere"}),
]  # fmt: skip


@pytest.mark.parametrize("method, settings", METHODS, ids=str)
def test_methods_check_their_fields(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(settings))):
        getattr(doxa, method)(**settings)


@pytest.mark.parametrize("n", [0, -1, 2.5, "ten"])
@pytest.mark.parametrize("method", ["deep-ensemble", "mean-field", "mc-dropout"])
def test_the_number_of_draws_is_checked(method: str, n: Any) -> None:
    x, y = table()
    posterior = doxa.fit(mlp(), (x, y), method, steps=2)
    for call in (lambda: posterior.predict(x, n=n), lambda: posterior.functions(x, n=n)):
        with pytest.raises(MethodError, match="n must be"):
            call()


def test_more_draws_than_were_kept_are_an_error() -> None:
    x, y = table()
    posterior = doxa.fit(mlp(), (x, y), "deep-ensemble", steps=2, members=3)
    with pytest.raises(MethodError, match="4 draws requested, but 3 are kept"):
        posterior.predict(x, n=4)
    with pytest.raises(MethodError, match="'samples' or 'moments'"):
        posterior.predict(x, keep="everything")


def test_settings_that_a_model_already_has() -> None:
    model = doxa.Model(mlp())
    for setting in ({"likelihood": "gaussian"}, {"prior": doxa.Normal()}, {"subset": "all"}):
        with pytest.raises(ModelError, match="already"):
            doxa.fit(model, table(), **setting)


def test_a_method_that_needs_a_network_says_so() -> None:
    with pytest.raises(ModelError, match="map needs a network"):
        doxa.fit(None, table(), "map")
    with pytest.raises(ModelError, match="Module"):
        doxa.fit(lambda x: x, table(), "map")  # type: ignore[arg-type]


def test_a_mode_that_cannot_run_here_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA graph runs here")
    posterior = doxa.fit(mlp(), table(), "deep-ensemble", steps=3, engine="stack:graph")
    assert "running eagerly" in caplog.text
    expected = doxa.fit(mlp(), table(), "deep-ensemble", steps=3, engine="stack")
    assert torch.equal(posterior.samples, expected.samples)


def test_every_error_is_one_of_ours() -> None:
    assert all(issubclass(error, DoxaError) for _, error, _ in SETTINGS)
