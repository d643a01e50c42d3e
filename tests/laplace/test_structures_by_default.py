"""Which structure "auto" is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.laplace import status
from doxa.priors import StudentTPrior

X = torch.randn(450, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :1]
FEW = slice(200)
LIMITS = (status.FULL, status._MOST_FULL)


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones, so that matrices are made quickly: 300 weights, or rows × outputs, and 900."""
    monkeypatch.setattr(status, "FULL", 300)
    monkeypatch.setattr(status, "_MOST_FULL", 900)


class Attending(nn.Module):
    """Attention, whose output layer is never called, over the columns of x."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(1, 8), nn.Linear(8, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x.unsqueeze(2))
        found: Tensor = self.leave(self.attention(h, h, h, need_weights=False)[0].mean(1))
        return found


class Own(nn.Module):
    """A person's own matrix, used in no layer of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, width) / 6**0.5)
        self.second = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(x @ self.first))
        return found


class Unused(nn.Module):
    """A layer whose weight is used and which is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 60), nn.Linear(60, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(x @ self.first.weight.T + self.first.bias))
        return found


def structure(
    net: nn.Module, method: doxa.Laplace | None = None, rows: slice = slice(None), **options: Any
) -> str:
    options = {"steps": 2, "progress": False, "validation": None} | options
    posterior = doxa.fit(net, (X[rows], Y[rows]), method or doxa.Laplace(), **options)
    return str(posterior.method.structure)


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (doxa.nets.mlp(6, 1, (20,)), "full"),
        (doxa.nets.mlp(6, 1, (60,)), "kronecker"),
        (Attending(), "full"),  # 313 weights
        (Own(60), "full"),
        (Own(200), "diagonal"),
        (Unused(), "full"),
    ],
)
def test_full_while_small_then_the_factors_of_layers(net: nn.Module, expected: str) -> None:
    assert structure(net) == expected


def test_a_kernel_while_rows_are_few() -> None:
    for net in (doxa.nets.mlp(6, 1, (60,)), Own(200), Attending()):
        assert structure(net, rows=FEW) == "functional"
    wide = doxa.nets.mlp(6, 1, (60,))
    by_layer = doxa.Laplace(tuned_scale="layer")  # a kernel has one scale,
    assert structure(wide, by_layer, FEW) == "kronecker"
    each = doxa.Gaussian(per_output=True)  # and one level of noise
    two = (X[FEW], X[FEW, :2])
    options: dict[str, Any] = {"steps": 2, "progress": False, "likelihood": each}
    posterior = doxa.fit(doxa.nets.mlp(6, 2, (60,)), two, "laplace", **options)
    assert posterior.method.structure == "kronecker"


def test_runs_of_different_lengths_have_one_structure() -> None:
    """The longest decides for all, also where a member is looked at alone."""
    rows = [torch.arange(320), torch.arange(450)]
    for longest, expected in ((1, "functional"), (2, "kronecker")):
        sweep = doxa.fit(
            doxa.nets.mlp(6, 1, (60,)), (X, Y), "laplace", steps=2, progress=False, members=2,
            runs=doxa.Runs(rows=rows[:longest]),
        )  # fmt: skip
        each = [p.method.structure for p in sweep]
        assert each == [expected] * longest


def test_a_last_layer_is_counted_alone() -> None:
    assert structure(doxa.nets.mlp(6, 1, (60,)), subset="last_layer") == "full"


def test_settings_that_need_the_whole_matrix_have_it() -> None:
    for method in (doxa.Laplace(newton_steps=1), doxa.Laplace(subnetwork=5)):
        assert structure(doxa.nets.mlp(6, 1, (60,)), method) == "full"
    narrow = doxa.Laplace(tuned_scale="layer")
    assert structure(doxa.nets.mlp(6, 1, (60,)), narrow) == "kronecker"


def test_factors_need_a_gaussian_prior() -> None:
    assert structure(doxa.nets.mlp(6, 1, (60,)), prior=StudentTPrior(5.0, 5.0)) == "full"


def test_what_is_named_is_kept() -> None:
    for name in ("full", "diagonal", "low-rank"):
        assert structure(doxa.nets.mlp(6, 1, (60,)), doxa.Laplace(structure=name)) == name


@pytest.mark.slow
def test_the_same_as_if_it_had_been_named() -> None:
    options: dict[str, Any] = {"steps": 20, "progress": False, "members": 2}
    for hidden, rows, expected in ((20, FEW, "full"), (60, FEW, "functional"),
                                   (60, slice(None), "kronecker")):  # fmt: skip
        net, data = doxa.nets.mlp(6, 1, (hidden,)), (X[rows], Y[rows])
        auto = doxa.fit(net, data, "laplace", **options)
        assert auto.method.structure == expected
        named = doxa.fit(net, data, doxa.Laplace(structure=expected), **options)
        assert torch.equal(auto.predict(X).std, named.predict(X).std)
        assert auto.log_evidence == named.log_evidence


def test_limits_are_those_that_the_docs_name() -> None:
    assert LIMITS == (2000, 5000)
