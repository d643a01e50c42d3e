"""Jacobians and Gauss–Newton matrices against autograd, one example at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import doxa
from doxa.laplace import curvature
from doxa.laplace.curvature import Jacobians, gauss_newton


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Attentive(nn.Module):
    """Two inputs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.left(a)) * self.right(b)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.a(h), self.b(h)


CASES: dict[str, tuple[nn.Module, Any, Any]] = {
    "mlp": (nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)), normal(6, 2), "gaussian"),
    "conv": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.Flatten(), nn.Linear(18, 2)),
        normal(4, 1, 5, 5),
        "gaussian",
    ),
    "batch norm": (
        nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)),
        normal(6, 2),
        "gaussian",
    ),
    "map": (nn.Conv1d(2, 3, 3, padding=1), normal(4, 2, 5), "gaussian"),
    "lstm": (Recurrent(), normal(3, 5, 3), "gaussian"),
    "dict": (Attentive(), {"a": normal(5, 2), "b": normal(5, 4)}, "gaussian"),
    "heads": (TwoHeads(), normal(5, 2), ("gaussian", "bernoulli")),
}


def members_of(name: str) -> tuple[doxa.Model, Tensor, Any]:
    net, x, likelihood = CASES[name]
    model = doxa.Model(net.double(), likelihood).build(x)
    return model, 0.5 * normal(2, model.layout.size, seed=1), x


def reference(model: doxa.Model, flat: Tensor, x: Any, rows: int) -> Tensor:
    """J [B, O, P] of one member by jacrev on single rows."""
    names = [name for name in model.layout.names if not name.startswith("likelihood.")]
    layout = model.layout.select(names)
    values = model.layout.unflatten(flat)
    own = layout.flatten({name: values[name] for name in names})
    each = []
    for b in range(rows):
        row = {k: v[b : b + 1] for k, v in x.items()} if isinstance(x, dict) else x[b : b + 1]

        def f(flat: Tensor, row: Any = row) -> Tensor:
            args, kwargs = ((), row) if isinstance(row, dict) else ((row,), {})
            out = functional_call(model.net, layout.unflatten(flat), args, kwargs)
            parts = out if isinstance(out, tuple) else (out,)
            return torch.cat([part.flatten() for part in parts])

        each.append(jacrev(f)(own))
    return torch.stack(each)


@pytest.mark.parametrize("name", CASES)
def test_jacobians_of_all_members_and_rows(name: str) -> None:
    model, flat, x = members_of(name)
    rows = len(next(iter(x.values()))) if isinstance(x, dict) else len(x)
    jacobians = Jacobians(model, flat, model.subset_names)
    f, j = jacobians(x)
    expected = torch.stack([reference(model, member, x, rows) for member in flat])
    assert j.shape == (2, rows, f.shape[-1], jacobians.layout.size)
    assert torch.allclose(j, expected, rtol=1e-9, atol=1e-12)
    assert jacobians.rowwise == (name == "lstm")


def test_rows_may_differ_between_members() -> None:
    model, flat, x = members_of("mlp")
    both = torch.stack([x, x + 1.0])
    f, j = Jacobians(model, flat, model.subset_names)(both, shared=False)
    for m in range(2):
        f_one, j_one = Jacobians(model, flat[m : m + 1], model.subset_names)(both[m])
        assert torch.allclose(f[m], f_one[0])
        assert torch.allclose(j[m], j_one[0])


def test_a_subset_has_the_columns_of_its_names() -> None:
    model, flat, x = members_of("mlp")
    whole = Jacobians(model, flat, model.subset_names)(x)[1]
    part = Jacobians(model, flat, ("2.weight", "2.bias"))(x)[1]
    assert torch.equal(part, whole[..., model.layout.index(["2.weight", "2.bias"])])


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "categorical", "poisson"])
def test_it_is_the_hessian_of_a_linear_model(likelihood: str) -> None:
    """With f linear in θ and these likelihoods, Gauss–Newton is exact."""
    x = normal(9, 2)
    net = nn.Linear(2, 3).double()
    model = doxa.Model(net, likelihood).build(x)
    y: Tensor = {
        "gaussian": normal(9, 3, seed=2),
        "bernoulli": (normal(9, 3, seed=2) > 0).double(),
        "categorical": torch.arange(9) % 3,
        "poisson": torch.arange(27.0).double().reshape(9, 3) % 4,
    }[likelihood]
    flat = 0.5 * normal(model.layout.size, seed=1)
    theta = {"log_noise": torch.tensor(-0.3).double()} if likelihood == "gaussian" else {}
    size = 9

    def loss(own: Tensor) -> Tensor:
        weight, bias = own[:6].reshape(3, 2), own[6:9]
        return -model.likelihood.log_prob(x @ weight.T + bias, y, theta).sum()

    exact = hessian(loss)(flat[:size])
    f, j = Jacobians(model, flat[None], model.subset_names)(x)
    stacked = {k: v[None] for k, v in theta.items()}
    c = model.likelihood.curvature(f, stacked, 1, y)
    assert torch.allclose(gauss_newton(j, c, None, False)[0], exact, rtol=1e-9, atol=1e-12)
    assert torch.allclose(gauss_newton(j, c, None, True)[0], exact.diagonal(), rtol=1e-9)


def test_row_weights_count_rows() -> None:
    model, flat, x = members_of("mlp")
    weight = torch.tensor([2.0, 0.0, 1.0, 1.0, 3.0, 0.5])
    _, j = Jacobians(model, flat, model.subset_names)(x)
    c = torch.eye(3).double().expand(2, 6, 3, 3)
    each = torch.stack([gauss_newton(j[:, b : b + 1], c[:, :1], None, False) for b in range(6)])
    expected = (weight.double()[:, None, None, None] * each).sum(0)
    assert torch.allclose(gauss_newton(j, c, weight, False), expected)
    assert torch.allclose(gauss_newton(j, c, weight.expand(2, 6), False), expected)


def test_chunks_cover_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, flat, _ = members_of("mlp")
    jacobians = Jacobians(model, flat, model.subset_names)
    monkeypatch.setattr(curvature, "_CHUNK_BYTES", {"cpu": 1 << 12})
    pieces = list(jacobians.chunks(100))
    assert len(pieces) > 10
    assert [i for piece in pieces for i in range(100)[piece]] == list(range(100))
