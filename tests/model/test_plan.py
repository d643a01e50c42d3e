"""The native batched forward pass equals `functional_call` one member at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import doxa
from doxa.model import Model
from doxa.model.layers import MaskedDropout, swap_dropout, with_input_dropout
from doxa.model.plan import Plan

M, N, D = 4, 6, 5


class Skip(nn.Module):
    """A residual net with a function call, methods, arithmetic and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        h = h + 0.5 * torch.tanh(self.inner(self.norm(h)))
        return self.last(h.sin() - h) / 2.0


class Shared(nn.Module):
    """One layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x)))


class Reflected(nn.Module):
    """A constant on the left of an operator, and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.layer(x), negative_slope=0.3)
        return 1.0 - torch.add(h, h.exp(), alpha=0.1)


NETS: dict[str, nn.Module] = {
    "linear": nn.Sequential(nn.Linear(D, 1)),
    "mlp": doxa.nets.mlp(D, 2, hidden=(7, 6), activation="tanh"),
    "no bias": nn.Sequential(nn.Linear(D, 7, bias=False), nn.ReLU(), nn.Linear(7, 1, bias=False)),
    "skip": Skip(),
    "shared": Shared(),
    "reflected": Reflected(),
    "layer norms": nn.Sequential(
        nn.LayerNorm(D), nn.Linear(D, 6), nn.LayerNorm(6, bias=False), nn.SELU(),
        nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 1),
    ),
    "flatten": nn.Sequential(nn.Flatten(), nn.Linear(D, 3), nn.Softplus()),
}  # fmt: skip


def stack(net: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(M, *p.shape, generator=g, dtype=torch.float64)
        for name, p in net.named_parameters()
    }


def rows(*lead: int, width: int = D) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(*lead, N, width, generator=g, dtype=torch.float64)


def one_by_one(net: nn.Module, params: Mapping[str, Tensor], x: Tensor, own: bool) -> Tensor:
    each = [
        functional_call(net, {k: v[m] for k, v in params.items()}, (x[m] if own else x,))
        for m in range(M)
    ]
    return torch.stack(each)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("own", [False, True], ids=["shared rows", "own rows"])
def test_plan_equals_functional_call(name: str, own: bool) -> None:
    net = NETS[name].double()
    plan, params = Plan.of(net), stack(net)
    assert plan is not None
    x = rows(M) if own else rows()
    out, has_axis = plan(params, lambda _name: True, x, own)
    assert has_axis
    torch.testing.assert_close(out, one_by_one(net, params, x, own), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "skip", "layer norms", "shared"])
def test_gradients_agree_too(name: str) -> None:
    net = NETS[name].double()
    plan, params = Plan.of(net), stack(net)
    assert plan is not None
    params = {k: v.requires_grad_() for k, v in params.items()}
    x = rows()
    native = torch.autograd.grad(
        plan(params, lambda _name: True, x, False)[0].square().sum(), list(params.values())
    )
    looped = torch.autograd.grad(
        one_by_one(net, params, x, False).square().sum(), list(params.values())
    )
    for a, b in zip(native, looped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "skip", "layer norms"])
def test_any_part_of_the_parameters_may_be_common(name: str) -> None:
    net = NETS[name].double()
    plan, params = Plan.of(net), stack(net)
    assert plan is not None
    x = rows()
    for own in params:  # only this one differs between members
        mixed = {k: v if k == own else v[0] for k, v in params.items()}
        full = {k: v if k == own else v[:1].expand_as(v) for k, v in params.items()}
        out, _ = plan(mixed, lambda name, own=own: name == own, x, False)
        torch.testing.assert_close(out, one_by_one(net, full, x, False), rtol=1e-12, atol=1e-12)


def test_common_parameters_are_computed_once() -> None:
    net = NETS["mlp"].double()
    plan = Plan.of(net)
    assert plan is not None
    params = {k: v[0] for k, v in stack(net).items()}
    out, has_axis = plan(params, lambda _name: False, rows(), False)
    assert not has_axis and out.shape == (N, 2)


def test_rows_with_more_than_one_axis() -> None:
    net = nn.Sequential(nn.Linear(D, 4), nn.LayerNorm((3, 4)), nn.Linear(4, 2)).double()
    plan, params = Plan.of(net), stack(net)
    assert plan is not None
    g = torch.Generator().manual_seed(3)
    for own in (False, True):
        shape = (M, N, 3, D) if own else (N, 3, D)
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        out, _ = plan(params, lambda _name: True, x, own)
        torch.testing.assert_close(out, one_by_one(net, params, x, own), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("common", [False, True])
def test_masks_are_applied_where_dropout_stood(common: bool) -> None:
    net = doxa.nets.mlp(D, 2, hidden=(7, 6), dropout=0.3).double()
    swap_dropout(net)
    plan, params = Plan.of(net), stack(net)
    assert plan is not None
    g = torch.Generator().manual_seed(4)
    sites = {"2": 7, "5": 6}
    u = {f"{k}.uniform": torch.rand(M, N, w, generator=g).double() for k, w in sites.items()}
    rates = {f"{k}.p": torch.linspace(0.1, 0.6, M).double() for k in sites}
    noise = u | rates
    x = rows()
    if common:
        params = {k: v[0] for k, v in params.items()}
    stacked = lambda name: name in noise or not common  # noqa: E731
    out, has_axis = plan({**params, **noise}, stacked, x, False)
    assert has_axis
    for m in range(M):
        own = params if common else {k: v[m] for k, v in params.items()}
        given = {k: v[m] for k, v in noise.items()}
        want = functional_call(net, {**own, **given}, (x,))
        torch.testing.assert_close(out[m], want, rtol=1e-12, atol=1e-12)
    fixed = dict(net.named_buffers())
    off, _ = plan({**fixed, **params}, lambda _name: not common, x, False)
    assert not torch.allclose(off, out)  # without noise dropout is the identity


def test_input_dropout_masks_the_input_of_its_layer() -> None:
    net = doxa.nets.mlp(D, 1, hidden=(7,)).double()
    params = stack(net)
    plain = net[2]
    net[2] = with_input_dropout(plain, MaskedDropout(0.5))
    assert net[2].weight is plain.weight
    assert type(plain) is nn.Linear
    plan = Plan.of(net)
    assert plan is not None
    u = torch.rand(M, N, 7, generator=torch.Generator().manual_seed(0)).double()
    mask = (u > 0.5).double() * 2
    x = rows()
    noise = {"2.dropout.uniform": u, "2.dropout.p": torch.full((M,), 0.5).double()}
    out, _ = plan({**params, **noise}, lambda _name: True, x, False)
    for m in range(M):
        p = {k: v[m] for k, v in params.items()}
        h = torch.relu(F.linear(x, p["0.weight"], p["0.bias"])) * mask[m]
        expected = F.linear(h, p["2.weight"], p["2.bias"])
        torch.testing.assert_close(out[m], expected, rtol=1e-12, atol=1e-12)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.layer(x) + z


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        return h, h.exp()


class Reduces(nn.Module):
    """Would mix members with rows: a sum over axis 0 is over rows only without a member axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class BareParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 1)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


class Custom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    net = doxa.nets.mlp(D, 1)
    net[0].register_forward_hook(lambda _m, _args, out: out * 2)
    return net


def pre_hooked() -> nn.Module:
    net = doxa.nets.mlp(D, 1)
    net[2].register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    return net


def hooked_whole() -> nn.Module:
    net = doxa.nets.mlp(D, 1)
    net.register_forward_hook(lambda _m, _args, out: out * 2)
    return net


def hooked_flatten() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(D, 1))
    net[0].register_forward_hook(lambda _m, _args, out: out * 2)
    return net


class ReadAsNumber(BareParameter):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(self.shift.detach().sum() + 1)


def replaced_forward() -> nn.Module:
    """As some libraries wrap layers: on the object, not by a hook."""
    net = doxa.nets.mlp(D, 1)
    own = net[0].forward
    net[0].forward = lambda x: 2 * own(x)
    return net


UNSUPPORTED = {
    "bare linear layer": lambda: nn.Linear(D, 1),
    "convolution": lambda: doxa.nets.lenet5(),
    "batch norm": lambda: nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    "group norm": lambda: nn.Sequential(nn.Linear(D, 4), nn.GroupNorm(2, 4), nn.Linear(4, 1)),
    "recurrent": lambda: nn.LSTM(D, 3),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2),
    "embedding": lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1)),
    "softmax over an axis": lambda: nn.Sequential(nn.Linear(D, 3), nn.Softmax(1)),
    "branching": Branching,
    "two inputs": TwoInputs,
    "two outputs": TwoOutputs,
    "reduction": Reduces,
    "bare parameter": BareParameter,
    "parameter read as a number": ReadAsNumber,
    "a forward of its own": replaced_forward,
    "subclassed layer": lambda: nn.Sequential(Custom(D, 1)),
    "its own dropout": lambda: nn.Sequential(nn.Linear(D, 3), nn.Dropout(0.5)),
    "flatten from another axis": lambda: nn.Sequential(nn.Flatten(0), nn.Linear(D, 1)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, 1)),
    "hook": hooked,
    "pre-hook": pre_hooked,
    "hook on a flatten": hooked_flatten,
    "hook on the whole": hooked_whole,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_it_cannot_do_it_leaves_alone(name: str) -> None:
    assert Plan.of(UNSUPPORTED[name]()) is None


@pytest.mark.parametrize(
    "name",
    [
        "bare linear layer", "reduction", "bare parameter", "two outputs", "hook", "pre-hook",
        "hook on the whole", "subclassed layer",
    ],
)  # fmt: skip
def test_the_engine_is_right_without_a_plan(name: str) -> None:
    net = UNSUPPORTED[name]().double()
    likelihood = ("gaussian", "gaussian") if name == "two outputs" else "gaussian"
    model = Model(net, likelihood)
    params = stack(net)
    x = rows()
    engine = doxa.Engine("stack")
    out = engine.apply(model, params, x).f
    looped = doxa.Engine("loop").apply(model, params, x).f
    for m in range(M):
        expected = functional_call(net, {k: v[m] for k, v in params.items()}, (x,))
        for a, b, e in zip(_tuple(out), _tuple(looped), _tuple(expected), strict=True):
            torch.testing.assert_close(a[m], e, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(b[m], e, rtol=1e-12, atol=1e-12)


def _tuple(value: object) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)  # type: ignore[return-value]


class Twice(nn.Module):
    """A linear layer's output, activated and used again as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.act(h) + h


def test_an_activation_does_not_overwrite_what_is_read_again() -> None:
    net = Twice()
    plan = Plan.of(net)
    assert plan is not None
    params = {name: p.detach() for name, p in net.named_parameters()}
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        value, _ = plan(params, lambda _name: False, x, False)
        torch.testing.assert_close(value, net(x))


def test_recording_touches_neither_the_network_nor_other_threads() -> None:
    """While one network is recorded, others run as ever: torch.fx's own tracer would catch them."""
    other, met = doxa.nets.mlp(D, 1), []

    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 1)

        def forward(self, x: Tensor) -> Tensor:
            def run() -> None:
                met.append(other(torch.ones(2, D)))

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return self.layer(x)

    net = Meets()
    assert Plan.of(net) is not None
    assert torch.equal(met[0], other(torch.ones(2, D)))
    assert "forward" not in vars(net.layer)
    assert type(net._parameters) is dict
