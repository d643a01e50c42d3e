"""Networks that draw random numbers of their own in training: dropout in `forward`, LSTMs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa

KEPT, UNITS, ROWS = 0.7, 8, 16


class Dropped(nn.Module):
    """Counts what its own dropout keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, UNITS), nn.Linear(UNITS, 1)
        self.register_buffer("kept", torch.zeros(()))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones(len(x), UNITS).to(x), 1 - KEPT, self.training)
        if self.training:
            self.kept += (mask > 0).sum()
            self.passes += 1
        return self.last(torch.tanh(self.first(x)) * mask)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(1, 4, 2, dropout=0.4, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.unsqueeze(2))[0][:, -1])


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2 * ROWS, 2, generator=g)
    return x, x.sum(1).sin()


def fit(net: nn.Module, **options: Any) -> Any:
    chosen = {"steps": 20, "members": 2, "batch_size": ROWS, "progress": False, **options}
    chosen = {"validation": None, "likelihood": "gaussian", **chosen}
    return doxa.fit(net, rows(), "deep-ensemble", **chosen)


@pytest.mark.parametrize("kind", [Dropped, Recurrent])
def test_the_seed_decides_them_and_nothing_global_moves(kind: Any, tmp_path: Path) -> None:
    """Whatever the default generator is at; a member is the same alone; a fit is resumed."""
    net, (x, _) = kind(), rows()
    generator = torch.get_rng_state()
    want = fit(net).predict(x).samples
    assert torch.equal(torch.get_rng_state(), generator)
    torch.rand(1)
    assert torch.equal(fit(net).predict(x).samples, want)
    assert torch.allclose(fit(net, members=[1]).predict(x).samples[0], want[1], atol=1e-5)
    assert not torch.equal(fit(net, seed=1).predict(x).samples, want)

    def stop(done: int, _info: Any) -> None:
        if done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(net, checkpoint=tmp_path / "run", callbacks=[stop])
    assert torch.equal(fit(net, checkpoint=tmp_path / "run").predict(x).samples, want)


def test_masks_are_new_at_every_step_and_for_every_member() -> None:
    """600 steps, past those from which a step would be recorded. The share of kept units has a
    standard error of 0.0017 where masks are independent, and of 0.04 where they repeat: four of
    these errors fail one seed in 16,000, and repeated masks pass one in 6 at most. Equal starts
    part, because every member draws its own."""
    posterior = fit(Dropped(), init="given", steps=600, batch_size=2 * ROWS)
    passes = posterior.buffers["passes"]
    assert passes.tolist() == [600, 600]
    shares = posterior.buffers["kept"] / (passes * 2 * ROWS * UNITS)
    error = (KEPT * (1 - KEPT) / (600 * 2 * ROWS * UNITS)) ** 0.5
    assert bool(((shares - KEPT).abs() < 4 * error).all())
    assert shares[0] != shares[1]
    x, _ = rows()
    first, second = posterior.predict(x).samples
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", ["mean-field", "sgld"])
def test_the_same_for_methods_that_ask_for_no_dropout(method: str) -> None:
    """Buffers that training changes keep such a network in training, so that it still draws."""
    settings: Any = {"draws": 5, "burn_in": 5, "thin": 1} if method == "sgld" else {}
    way, net, (x, _) = doxa.get_method(method)(**settings), Dropped(), rows()

    def fit(members: Any) -> Any:
        return doxa.fit(
            net, rows(), way, members=members, likelihood="gaussian", progress=False, steps=10,
            batch_size=ROWS, dtype=torch.float64, validation=None,
        )  # fmt: skip

    generator = torch.get_rng_state()
    together, alone = fit(2), fit([1])
    assert torch.equal(torch.get_rng_state(), generator)
    kept = together.buffers["kept"]
    assert kept[0] != kept[1] == alone.buffers["kept"][0]
    n = 3 if method == "mean-field" else 5
    got, want = alone.functions(x, n), together.functions(x, 2 * n)[n:]
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)
