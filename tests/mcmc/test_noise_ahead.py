"""Noise of large networks: added up in its own memory, it is the same noise, also when resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa.mcmc import noise_ahead

METHODS = {
    "sgld": doxa.SGLD(draws=12, burn_in=12, thin=2, step=1e-4),
    "sghmc": doxa.SGHMC(draws=12, burn_in=12, thin=2, step=1e-4),
    "cyclical": doxa.CyclicalSGMCMC(cycles=2, draws=6, thin=2, step=1e-4),
}


def fit(method: Any, **options: Any) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=g, dtype=torch.float64)
    net = doxa.nets.mlp(3, 1, hidden=(7,)).double()
    chosen = {"members": 2, "batch_size": 8, "progress": False, **options}
    return doxa.fit(net, (x, x[:, :1].sin()), method, **chosen).samples


@pytest.mark.parametrize("engine", ["stack:eager", "stack:traced"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_sums_in_place_are_the_same(
    method: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = fit(method, engine=engine)
    monkeypatch.setattr(noise_ahead, "_LARGE", 1)
    torch.testing.assert_close(fit(method, engine=engine), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_large_chain_is_resumed_to_the_bit(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block holds one step's noise, and θ lies in its memory."""
    monkeypatch.setattr(noise_ahead, "_LARGE", 1)
    monkeypatch.setattr(noise_ahead, "_BLOCK", 1)
    want = fit(method)

    def stop(step: int, info: Any) -> None:
        if step >= 20:
            raise KeyboardInterrupt

    kept = {"checkpoint": tmp_path / "run", "checkpoint_every": 0}
    with pytest.raises(KeyboardInterrupt):
        fit(method, callbacks=[stop], **kept)
    assert torch.equal(fit(method, **kept), want)
