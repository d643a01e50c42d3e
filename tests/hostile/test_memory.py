"""What would not fit is refused with its size; what is streamed fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import MemoryBudgetError

N, D = 200, 3


def table() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


METHODS: dict[str, Any] = {
    "deep-ensemble": "deep-ensemble", "mean-field": "mean-field", "mc-dropout": "mc-dropout",
    "hmc": doxa.HMC(draws=20, burn_in=4, leapfrog=2),
}  # fmt: skip


def posterior(name: str, net: nn.Module | None = None, data: Any = None, **settings: Any) -> Any:
    net = net or doxa.nets.mlp(D, 1, hidden=(8,))
    return doxa.fit(net, data or table(), METHODS[name], steps=3, **settings)


@pytest.mark.parametrize("name", METHODS)
def test_samples_beyond_the_budget_raise_with_their_size(name: str) -> None:
    x, _ = table()
    fitted = posterior(name)
    samples = fitted.predict(x).samples.shape[0]
    size = samples * N * 4
    fitted.memory_budget = size - 1
    message = rf"{samples} samples at {N} rows take .* GiB.*keep='moments'"
    with pytest.raises(MemoryBudgetError, match=message) as caught:
        fitted.predict(x)
    assert f"{size / 2**30:.3g} GiB" in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(MemoryBudgetError):
        fitted.functions(x, n=samples)
    fitted.memory_budget = size
    fitted.predict(x)


@pytest.mark.parametrize("name", METHODS)
def test_moments_are_those_of_the_samples(name: str) -> None:
    x, _ = table()
    fitted = posterior(name)
    full = fitted.predict(x)
    fitted.memory_budget = 1
    streamed = fitted.predict(x, keep="moments")
    for quantity in ("mean", "variance", "aleatoric", "epistemic"):
        torch.testing.assert_close(
            getattr(streamed, quantity), getattr(full, quantity), rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(
        streamed.aleatoric + streamed.epistemic, streamed.variance, rtol=1e-6, atol=1e-7
    )


def test_moments_of_classes() -> None:
    x, _ = table()
    y = torch.arange(N) % 3
    fitted = posterior("deep-ensemble", doxa.nets.mlp(D, 3), (x, y), likelihood="categorical")
    full = fitted.predict(x)
    fitted.memory_budget = 1
    streamed = fitted.predict(x, keep="moments")
    for quantity in ("probs", "entropy", "mutual_information"):
        torch.testing.assert_close(
            getattr(streamed, quantity), getattr(full, quantity), rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(streamed.log_prob(y), full.log_prob(y), rtol=1e-4, atol=1e-5)


def test_the_default_budget_is_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = table()
    fitted = posterior("mean-field")
    monkeypatch.setattr("doxa.posterior.weights.free_memory", lambda *_: 1000)
    with pytest.raises(MemoryBudgetError, match=r"budget of 2\.33e-07 GiB"):
        fitted.predict(x)


def test_a_prediction_that_cannot_fit_any_machine_fails_before_it_starts() -> None:
    fitted = posterior("mean-field")
    with pytest.raises(MemoryBudgetError, match=rf"{10**9} samples at {N} rows take 745 GiB"):
        fitted.predict(table()[0], n=10**9)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_draws_are_made_in_parts_where_they_do_not_fit(subset: str) -> None:
    """The same draws, whether all at once or a few at a time."""
    x, y = table()
    options = {"members": 2, "steps": 5, "subset": subset, "dtype": torch.float64}
    fitted = doxa.fit(doxa.nets.mlp(D, 1), (x, y), "mean-field", **options)
    full = fitted.predict(x[:3], n=11).samples
    fitted.memory_budget = 3 * 4 * 8 * fitted.subset.size  # three draws
    assert len(list(fitted.groups(11, 0))) == 4
    torch.testing.assert_close(fitted.predict(x[:3], n=11).samples, full, rtol=1e-12, atol=1e-12)
