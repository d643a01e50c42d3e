"""What every method written against the protocol is held to: it trains, members do not depend on
each other, and an interrupted fit goes on to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import doxa


def losses(posterior: Any) -> list[float]:
    """The mean loss over members, as it was recorded."""
    return [sum(values) / len(values) for _, values in posterior.history["loss"]]


def held_to_the_protocol(net: Any, data: Any, method: Any, folder: Path, **options: Any) -> Any:
    """The posterior of three members, after all checks."""
    options = {"steps": 60, "batch_size": 8, "lr": 0.02, "progress": False, **options}
    together = doxa.fit(net, data, method, members=3, **options)
    assert together.status in ("ok", "underfit"), together.status.reason  # of few steps
    start, end = losses(together)[0], losses(together)[-1]
    assert end < start - 0.1, f"the loss went from {start:.3g} to {end:.3g}"
    alone = doxa.fit(net, data, method, members=[1], **options)
    for name, value in alone.tensors().items():
        other = together.tensors()[name]
        other = other[1:2] if other.shape[:1] == (3,) else other
        assert torch.allclose(value, other, rtol=1e-6, atol=1e-8), name

    def interrupt(step: int, info: Any) -> None:
        if step >= 20:
            raise KeyboardInterrupt

    kept = {"checkpoint": folder / "checkpoint", **options}
    try:
        doxa.fit(net, data, method, members=3, callbacks=[interrupt], **kept)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the fit was not interrupted")
    again = doxa.fit(net, data, method, members=3, **kept)
    assert again.history == together.history
    for name, value in together.tensors().items():
        assert torch.equal(again.tensors()[name], value), name
    return together


def curve(rows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, rows, dtype=torch.float64).unsqueeze(1)
    g = torch.Generator().manual_seed(0)
    return x, x.sin() + 0.1 * torch.randn(rows, 1, generator=g, dtype=torch.float64)
