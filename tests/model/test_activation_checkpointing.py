"""A network that computes activations again in its backward pass is refused, and no other one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import doxa
from doxa.errors import ModelError

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


class Again(nn.Module):
    """A block that may be checkpointed: as a module, or as a function of its weight alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.head, self.how = nn.Linear(8, 1), how

    def forward(self, x: Tensor) -> Tensor:
        def last(h: Tensor) -> Tensor:
            return (h @ self.weight).tanh()

        if self.how == "module":
            h: Any = last(checkpoint(self.block, x, use_reentrant=False))
        elif self.how == "function":
            h = checkpoint(last, self.block(x), use_reentrant=False)
        else:
            h = last(self.block(x))
        return self.head(h)


def fit(net: nn.Module) -> Any:
    return doxa.fit(
        net, (X, X[:, 0]), "map", steps=3, validation=None, progress=False, likelihood="gaussian"
    )


@pytest.mark.parametrize("how", ["module", "function"])
def test_a_part_that_is_computed_again_is_refused(how: str) -> None:
    with pytest.raises(ModelError, match="again in the backward pass"):
        fit(Again(how))


def test_a_network_without_it_is_fitted() -> None:
    assert fit(Again("never")).status in ("ok", "not-evaluated", "underfit")


def test_gradients_that_are_not_finite_are_another_error() -> None:
    """A square root at zero has no finite gradient, with any weights."""

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            f = self.head(x)
            return f + (0.0 * f).sqrt()

    with pytest.raises(Exception) as caught:  # diverged, or not finite
        fit(Rooted())
        raise RuntimeError("was fitted")
    assert "again in the backward pass" not in str(caught.value)
