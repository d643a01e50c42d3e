"""Gradients of every row from passes with hooks, against reverse mode on single rows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import doxa
from doxa.laplace.curvature import Jacobians
from doxa.laplace.layers import Head


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


class Net(nn.Module):
    """A network from modules and a function of them and x."""

    def __init__(self, run: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Scale(nn.Module):
    """A user's own layer, with a parameter that no layer of torch has."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return self.by * torch.tanh(x)


class Conv1D(nn.Module):
    """As the linear layer of GPT-2: the weight is [inputs, outputs]."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(normal(inputs, outputs))
        self.bias = nn.Parameter(normal(outputs, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def in_time(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.first(x))).mean(1)  # [B, T, d]


def rows_merged(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.first(x.reshape(-1, x.shape[-1])))  # [B·T, d]
    return net.head(h).reshape(*x.shape[:2], -1).sum(1)


def times_merged(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.first(x.transpose(0, 1).reshape(-1, x.shape[-1])))  # [T·B, d]
    return net.head(h).reshape(x.shape[1], len(x), -1).sum(0)


def with_places(net: Any, x: Tensor) -> Tensor:
    h = net.first(x) + net.place(torch.arange(x.shape[1])[None])  # [1, T, d]
    return net.head(torch.tanh(h)).mean(1)


def in_place(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.relu_(net.first(x)))


def tied(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.first(x))
    return net.head(h) + (h @ net.first.weight).sum(-1, keepdim=True)


def read_apart(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.first(x))) + net.first.weight.sum()


def two(run: Any) -> Net:
    return Net(run, first=nn.Linear(3, 5), head=nn.Linear(5, 2))


def tokens(net: Any, x: Tensor) -> Tensor:
    h = net.again(net.norm(net.embed(x)).transpose(0, 1))
    return net.head(net.scale(net.again(h)).mean(0))


CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "mlp": (nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)), normal(6, 2)),
    "time": (two(in_time), normal(4, 6, 3)),
    "rows merged": (two(rows_merged), normal(4, 6, 3)),
    "times merged": (two(times_merged), normal(4, 6, 3)),
    "positions": (
        Net(with_places, first=nn.Linear(3, 5), place=nn.Embedding(6, 5), head=nn.Linear(5, 2)),
        normal(4, 6, 3),
    ),
    "in place": (two(in_place), normal(4, 3)),
    "tokens": (
        Net(
            tokens, embed=nn.Embedding(7, 4, padding_idx=0), norm=nn.LayerNorm(4),
            again=nn.Linear(4, 4), scale=Scale(4), head=nn.Linear(4, 3),
        ),
        torch.tensor([[1, 3, 3, 0, 6], [2, 2, 2, 4, 1], [5, 0, 0, 6, 3]]),
    ),
    "pixels": (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4),
            nn.ConvTranspose2d(4, 1, 2, stride=2),
        ),
        normal(3, 2, 8, 8),
    ),
    "gpt": (nn.Sequential(Conv1D(5, 3), nn.Tanh(), Conv1D(2, 5)), normal(4, 6, 3)),
}  # fmt: skip


def jacobian(model: doxa.Model, flat: Tensor, x: Tensor) -> Tensor:
    """[B, O, P] of one member, row by row."""
    layout = model.layout

    def f(flat: Tensor, row: Tensor) -> Tensor:
        return functional_call(model.net, layout.unflatten(flat), (row,)).flatten()

    return torch.stack([jacrev(f)(flat, x[b : b + 1]) for b in range(len(x))])


def built(net: nn.Module, x: Tensor) -> tuple[doxa.Model, Tensor, Tensor]:
    """The model, weights of two members, and their Jacobians."""
    model = doxa.Model(net.double(), doxa.Gaussian(1.0)).build(x)
    flat = 0.5 * normal(2, model.layout.size, seed=1)
    return model, flat, torch.stack([jacobian(model, own, x) for own in flat])


@pytest.mark.parametrize("name", CASES)
def test_rows_run_together_and_their_gradients_are_those_of_each_alone(name: str) -> None:
    model, flat, j = built(*CASES[name])
    x = CASES[name][1]
    source = Jacobians(model, flat, model.subset_names)
    assert source.passes.plan(x).mode == "batch"
    assert source.left(x) == []
    columns = normal(2, len(x), j.shape[2], 3, seed=2)
    expected = columns.mT @ j
    found = source.gradients(x)
    assert torch.allclose(found.rows(columns), expected, rtol=1e-10, atol=1e-11)
    assert torch.allclose(found.total(columns), expected.sum(1), rtol=1e-10, atol=1e-11)
    squares = expected.square().sum((1, 2))
    assert torch.allclose(found.squares(columns), squares, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("run", [tied, read_apart], ids=["tied", "read apart"])
def test_a_weight_that_is_read_outside_of_its_layer_is_left_to_the_whole_network(run: Any) -> None:
    net, x = two(run), normal(4, 3)
    model, flat, j = built(net, x)
    source = Jacobians(model, flat, model.subset_names)
    assert source.left(x) == ["first.weight", "first.bias"]
    columns = normal(2, 4, j.shape[2], 3, seed=2)
    assert torch.allclose(source.gradients(x).rows(columns), columns.mT @ j, rtol=1e-10)
    with pytest.raises(doxa.errors.MethodError, match="used without a call of their layer"):
        doxa.fit(net, (x, normal(4, 2)), doxa.Laplace("kronecker", train=False), init="given")


def test_rows_that_depend_on_each_other_do_not_run_together() -> None:
    """J is that of a row alone."""
    net = two(lambda net, x: net.head(torch.tanh(net.first(x) - 0.1 * x.sum())))
    x = normal(4, 3)
    model, flat, j = built(net, x)
    source = Jacobians(model, flat, model.subset_names)
    assert source.passes.plan(x).mode == "vmap"
    eye = torch.eye(2, dtype=x.dtype).expand(2, 4, 2, 2)
    assert torch.allclose(source.gradients(x).rows(eye), j, rtol=1e-10)


def branching(net: Any, x: Tensor) -> Tensor:
    """A branch by the data, which vmap refuses."""
    h = net.first(x)
    return net.head(torch.tanh(h) if bool((x[..., 0] > -99).all()) else h)


def test_without_vmap_rows_run_together_and_nothing_is_slow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, flat, j = built(two(branching), normal(4, 3))
    with caplog.at_level(logging.INFO, "doxa"):
        for _ in range(3):
            found = Jacobians(model, flat, model.subset_names)
            assert torch.allclose(found(normal(4, 3))[1], j, rtol=1e-10)
    assert not found.rowwise
    assert [r.levelname for r in caplog.records] == ["INFO"]  # said once
    assert "hooks on its layers instead, 2 backward passes per batch" in caplog.text


class Own(nn.Module):
    """Weights outside of layers, and a branch by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(normal(3, 2))
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.w) if bool((x < 99).all()) else x


def test_one_row_at_a_time_is_said_once_with_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    x, y = normal(9, 3), torch.arange(9) % 2
    method = doxa.Laplace("full", train=False)
    with caplog.at_level(logging.WARNING, "doxa"):
        doxa.fit(Own().double(), (x, y), method, init="given", likelihood="categorical",
                 batch_size=4, validation=None)  # fmt: skip
    said = [r.getMessage() for r in caplog.records if "vmap" in r.getMessage()]
    assert len(said) == 1
    assert "one row at a time: 4 passes and 8 gradients for 4 rows" in said[0]


def test_the_linear_layer_of_gpt2_has_the_factors_of_a_linear_layer() -> None:
    x, y = normal(20, 3), torch.arange(20) % 2
    first = Conv1D(4, 3)
    linear = nn.Linear(3, 4).double()
    linear.weight.data, linear.bias.data = first.weight.data.T.clone(), first.bias.data.clone()
    head = nn.Linear(4, 2).double()
    options: dict[str, Any] = {"init": "given", "likelihood": "categorical", "validation": None}
    one, other = (
        doxa.fit(nn.Sequential(layer, nn.Tanh(), head), (x, y),
                 doxa.Laplace("kronecker", train=False), **options)
        for layer in (first, linear)
    )  # fmt: skip
    assert one.log_evidence == pytest.approx(other.log_evidence, rel=1e-12)
    ours, theirs = (
        own.covariance.diagonal()[:, own.layout.index(["0.weight"])] for own in (one, other)
    )
    assert torch.allclose(ours.reshape(3, 4), theirs.reshape(4, 3).T, rtol=1e-9)
    variances = [own.jacobians().variance(x, own.covariance)[1] for own in (one, other)]
    assert torch.allclose(*variances, rtol=1e-9)


class Trunk(nn.Module):
    """A network that vmap refuses, up to its last layer."""

    def __init__(self, outputs: int, bias: bool = True, after: float = 1.0) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, outputs, bias=bias)
        self.after, self.calls = after, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x)
        h = torch.tanh(h) if bool((x < 99).all()) else h
        return self.head(h[:, -1] if h.ndim == 3 else h) * self.after


@pytest.mark.parametrize("subset", ["last_layer", ("head.weight",)], ids=["whole", "weight"])
@pytest.mark.parametrize("outputs", [2, 40])
def test_products_of_a_last_layer_come_from_its_features(outputs: int, subset: Any) -> None:
    net, x = Trunk(outputs).double(), normal(6, 4, 3)
    model = doxa.Model(net, doxa.Gaussian(1.0), subset=subset).build(x)
    flat = 0.5 * normal(2, model.layout.size, seed=1)
    index = model.layout.index(model.subset_names)
    j = torch.stack([jacobian(model, own, x) for own in flat])[..., index]
    source = Jacobians(model, flat, model.subset_names)
    head = Head.of(source, x)
    assert head is not None
    delta, pulls = normal(2, 3, j.shape[-1], seed=2), normal(2, 6, outputs, seed=3)
    along = torch.einsum("kbop,ksp->ksbo", j, delta)
    assert torch.allclose(head.along(delta), along, rtol=1e-10, atol=1e-12)
    assert torch.allclose(source.along(x, delta)[1], along, rtol=1e-10, atol=1e-12)
    back = torch.einsum("kbop,kbo->kp", j, pulls)
    assert torch.allclose(head.back(pulls), back, rtol=1e-10, atol=1e-12)
    calls = model.net.calls
    head.along(delta)
    head.back(pulls)
    assert model.net.calls == calls  # no pass of the network


def test_what_follows_a_last_layer_is_seen() -> None:
    x = normal(6, 3)
    model = doxa.Model(Trunk(12, after=2.0).double(), doxa.Gaussian(1.0), subset="last_layer")
    model.build(x)
    flat = 0.5 * normal(1, model.layout.size, seed=1)
    source = Jacobians(model, flat, model.subset_names)
    assert Head.of(source, x) is None
    j = jacobian(model, flat[0], x)[..., model.layout.index(model.subset_names)]
    delta = normal(1, 3, j.shape[-1], seed=2)
    expected = torch.einsum("bop,ksp->ksbo", j, delta)
    assert torch.allclose(source.along(x, delta)[1], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
def test_a_last_layer_of_many_classes_after_a_trunk_that_vmap_refuses(structure: str) -> None:
    """Sampled curvature, mean correction and predictions."""
    net, x, y = Trunk(300).double(), normal(30, 3), torch.arange(30) * 7 % 300
    model = doxa.Model(net, "categorical", doxa.Normal(1.0), subset="last_layer")
    method = doxa.Laplace(structure, train=False, mean_correction=True)
    p = doxa.fit(model, (x, y), method, init="given", validation=None)
    assert p.diagnostics["curvature"]["kind"] == "sampled"
    assert p.predict(x).probs.sum(1) == pytest.approx(1.0)
