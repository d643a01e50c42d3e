"""Half precision: the network's products in bfloat16, and nothing else."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import DoxaError, MethodError
from doxa.optim import SGD

SEEN: list[str] = []


class Watched(nn.Linear):
    """A linear layer that notes the type of what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        SEEN.append(str(out.dtype))  # as text: the network is also traced, with no types
        return out


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :1] * x[:, 1:2] > 0).long().squeeze(1)


def fit(method: Any = "deep-ensemble", net: nn.Module | None = None, **options: Any) -> Any:
    net = net or nn.Sequential(Watched(8, 32), nn.Tanh(), nn.Linear(32, 2))
    asked = {"precision": "bfloat16", "members": 2, "steps": 12, "batch_size": 32}
    return doxa.fit(
        net, data(), method, validation=None, likelihood="categorical", **asked | options
    )


@pytest.mark.parametrize("engine", ["loop:eager", "stack:eager", "stack:traced"])
def test_a_step_is_that_of_a_network_in_half_precision(engine: str) -> None:
    """The move of one step of SGD is within bfloat16's 2⁻⁸ of the full one, and not the same."""
    options = {"engine": engine, "steps": 1, "optimizer": SGD(0.0), "schedule": "constant"}
    start, full, half = (
        fit(precision=precision, lr=lr, **options).samples
        for precision, lr in (("full", 1e-30), ("full", 0.1), ("bfloat16", 0.1))
    )
    assert half.dtype == torch.float32
    off = (half - full).norm() / (full - start).norm()
    assert 1e-5 < off < 2**-5  # some roundings of 2⁻⁹ each, in two layers and back


def test_products_are_in_half_precision_in_training_alone() -> None:
    SEEN.clear()
    posterior = fit(engine="loop:eager")
    assert "torch.bfloat16" in SEEN and posterior.diagnostics["precision"] == "bfloat16"
    SEEN.clear()
    p = posterior.predict(data()[0])
    assert p.probs.dtype == torch.float32 and "torch.bfloat16" not in SEEN


def test_the_same_bits_again_and_after_a_checkpoint(tmp_path: Path) -> None:
    first, again = fit(), fit()
    assert torch.equal(first.samples, again.samples)
    stop = lambda step, info: step >= 6  # noqa: E731
    fit(checkpoint=tmp_path / "run", checkpoint_every=0, callbacks=[stop])
    resumed = fit(checkpoint=tmp_path / "run", checkpoint_every=0)
    assert torch.equal(first.samples, resumed.samples)
    with pytest.raises(DoxaError, match="another fit"):
        fit(checkpoint=tmp_path / "run", precision="full")


def test_what_must_be_exact_is_refused() -> None:
    for method in ("hmc", "sgld", "laplace", "fbnn"):
        with pytest.raises(MethodError, match=f"{method} computes in full precision only"):
            fit(method)
    with pytest.raises(MethodError, match="mixed with float32"):
        fit(dtype=torch.float64)
    with pytest.raises(MethodError, match="precision must be 'full' or 'bfloat16' or 'tf32'"):
        fit(precision="half")


def test_tf32_is_of_cuda_devices_and_of_methods_that_bear_it() -> None:
    with pytest.raises(MethodError, match="precision='tf32' is of CUDA devices"):
        fit(precision="tf32")
    with pytest.raises(MethodError, match="the three digits of tf32 are not enough"):
        fit("hmc", precision="tf32")


def switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_tf32_is_on_while_a_fit_trains_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a CUDA device, the check of the device is removed: the switches have no effect on
    the CPU, so the result has the same bits."""
    plain = fit(precision="full")
    monkeypatch.setattr(import_module("doxa.fit"), "check_precision", lambda *_: None)
    before, seen = switches(), []
    rounded = fit(precision="tf32", callbacks=[lambda step, info: seen.append(switches()) and None])
    assert set(seen) == {(True, True)} and switches() == before
    assert torch.equal(plain.samples, rounded.samples)
    assert rounded.diagnostics["precision"] == "tf32"

    def fails(step: int, info: Any) -> None:
        raise KeyError(step)

    with pytest.raises(KeyError):
        fit(precision="tf32", callbacks=[fails])
    assert switches() == before


def test_two_fits_with_tf32_leave_the_switches_as_they_were() -> None:
    """The first to begin ends first."""
    engine, before = doxa.Engine(tf32=True), switches()
    first, second = engine.rounding(), engine.rounding()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert switches() == (True, True)
    second.__exit__(None, None, None)
    assert switches() == before
