"""Networks whose layers have no batched form, or reshape their rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from short import short_settings
from torch import Tensor, nn

import doxa

Check = Callable[..., None]


class Folded(nn.Module):
    """Rows [B, T·d] taken apart into [B·T, d], with dropout there, and summed over T again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.reshape(-1, 2)  # [B·T, d]
        each = self.last(self.drop(torch.tanh(self.first(pieces))))
        return each.reshape(len(x), -1).sum(1, keepdim=True)


def folded_rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(36, 6, generator=g, dtype=torch.float64)
    return x, torch.sin(x).sum(1)


@pytest.mark.parametrize("engine", ["stack", "loop"])
@pytest.mark.parametrize("name", ["map", "deep-ensemble", "mc-dropout"])
def test_dropout_after_a_reshape(name: str, engine: str) -> None:
    x, y = folded_rows()
    torch.manual_seed(0)
    fit = lambda **more: doxa.fit(  # noqa: E731
        Folded(), (x, y), name, members=2, steps=150, standardize=True, validation=None,
        engine=engine, dtype=torch.float64, progress=False, **more,
    )  # fmt: skip
    posterior = fit()
    p = posterior.predict(x)
    assert p.mean.shape == (36,)
    assert float((p.mean - y).square().mean()) < 0.5 * float(y.var())
    part = posterior.predict(x[:5])
    assert torch.allclose(part.mean, p.mean[:5], rtol=1e-9)
    assert (p.epistemic > 0).all()


NO_PLAN = {
    "conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1)
    ),
    "group norm": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 1)
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("conv1d", "map"), ("group norm", "mean-field"), ("conv1d", "sgld"),
        pytest.param("group norm", "map", marks=pytest.mark.matrix),
        pytest.param("conv1d", "mean-field", marks=pytest.mark.matrix),
        pytest.param("group norm", "sgld", marks=pytest.mark.matrix),
    ],
)  # fmt: skip
def test_a_network_without_batched_layers_is_recorded(
    kind: str, name: str, assert_close: Check, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = folded_rows()
    method = doxa.SGLD(draws=10, burn_in=10, thin=1, step_size=1e-4) if name == "sgld" else name
    fits = [
        doxa.fit(
            NO_PLAN[kind](), (x, y), method, members=3, steps=30, engine=f"stack:{mode}",
            standardize=True, dtype=torch.float64, progress=False,
        )
        for mode in ("eager", "traced")
    ]  # fmt: skip
    assert fits[0].model.plan is None
    assert [p.diagnostics["mode"] for p in fits] == ["eager", "traced"]
    assert "running eagerly" not in caplog.text
    assert_close(fits[1].tensors(), fits[0].tensors(), 1e-9)


class Scalar(nn.Module):
    """One number per row, without an axis of its own: outputs [N]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).squeeze(-1)


@pytest.mark.parametrize(
    "name", [row.name for row in doxa.methods() if doxa.get_method(row.name).needs_network]
)
def test_outputs_may_have_no_axis(name: str) -> None:
    """Held-out rows are scored, too, by the methods that have some."""
    x, y = (t.repeat(2, *[1] * (t.ndim - 1)) for t in folded_rows())
    method = doxa.get_method(name)(**short_settings(name))
    posterior = doxa.fit(Scalar(), (x, y), method, steps=8, dtype=torch.float64, progress=False)
    p = posterior.predict(x)
    assert p.mean.shape == p.variance.shape == y.shape
    assert p.log_prob(y).shape == y.shape
