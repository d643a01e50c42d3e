"""Nested draws: their equation, unbiased gradients and values, less variance than as many draws of
the weights, the linear anchor, and which networks have them.

On a linear network with noise s the expectation of the ELBO's gradient is known: by μ it is
Xᵀ(y − Xμ)/s² − μ, by ρ = log σ it is 1 − σ² (1 + Σ x²/s²).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import doxa
from doxa.engine import Engine
from doxa.method import Stage
from doxa.model.spread import NestedLinear, with_nested
from doxa.vi.estimators import all_draws, nested_draws

STD, NOISE = 0.3, 0.8
MEMBERS, STEPS = 60, 50
DRAWS = MEMBERS * STEPS


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def mlp(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1]).double()


@pytest.mark.parametrize("draws", [(2, 6), (4, 4), (1, 3), (3, 9)], ids=str)
def test_each_draw_is_that_of_the_equation(draws: tuple[int, int]) -> None:
    """Row by row and draw by draw, of two layers; all engines give the same."""
    net, rows, members = mlp(3, 4, 2), 5, 2
    model = doxa.Model(net).rewrite(
        lambda name, layer: (
            with_nested(layer, draws[int(name) // 2]) if name in ("0", "2") else None
        )
    )
    x = normal(rows, 3)
    model.build(x)
    half = [n // 2 if n % 2 == 0 else n for n in draws]
    given = {}
    for i, (n, out) in enumerate(zip(half, (4, 2), strict=True)):
        given[f"{2 * i}.eps"] = normal(members, rows * n, out, seed=i)
        assert model.sites[f"{2 * i}.eps"].rows == n
    params = {k: v.detach() + normal(members, *v.shape, seed=7) for k, v in net.named_parameters()}
    for name, value in params.items():
        given[f"{name}_away"] = (0.1 + value.square()).square()

    def noise(member: int, layer: int, row: int, draw: int) -> Tensor:
        sign = 1 if draw < half[layer] else -1
        return sign * given[f"{2 * layer}.eps"][member, row * half[layer] + draw % half[layer]]

    wanted = torch.empty(members, rows, draws[1], 2).double()
    for m in range(members):
        w, b, v, c = (params[k][m] for k in ("0.weight", "0.bias", "2.weight", "2.bias"))
        sw, sb, sv, sc = (
            given[f"{k}_away"][m] for k in ("0.weight", "0.bias", "2.weight", "2.bias")
        )
        for r in range(rows):
            for s in range(draws[1]):
                above = s * draws[0] // draws[1]  # the draw of the first layer that it belongs to
                first = w @ x[r] + b + (sw @ x[r] ** 2 + sb).sqrt() * noise(m, 0, r, above)
                h = first.tanh()
                wanted[m, r, s] = v @ h + c + (sv @ h**2 + sc).sqrt() * noise(m, 1, r, s)
    for engine in (Engine("loop"), Engine("stack"), Engine("stack", native=False)):
        f = engine.apply(model, params, x, buffers=given).f
        torch.testing.assert_close(f, wanted.flatten(1, 2))
    first = {k: v[0] for k, v in params.items()}
    torch.testing.assert_close(  # without noise: the plain network
        model.forward(first, x), functional_call(net, first, (x,))
    )


FOUND: list[tuple[Tensor, dict[str, Tensor]]] = []


@dataclass(frozen=True)
class Estimates(doxa.MeanField):
    """The ELBO and its gradients where it starts, many of them."""

    name: ClassVar[str] = "mean-field-nested-estimates"

    def stages(self, run: Any) -> Any:
        objective = self.objective(run)

        def step(run: Any, state: Any, batch: Any, clock: Any) -> Any:
            value, grads, _ = run.value_and_grad(objective, state, batch, clock, ("mean", "rho"))
            FOUND.append((value, grads))
            return state, {}

        yield Stage("estimates", step, STEPS, "all", over=("mean",), capturable=False)


def regression(inputs: int = 2, count: int = 12) -> tuple[Tensor, Tensor]:
    x = normal(count, inputs, seed=5)
    return x, x[:, :1] - 0.5 * x[:, 1:2] + normal(count, 1, seed=6)


NETWORKS: dict[str, tuple[int, ...]] = {
    "linear": (2, 1), "2-3-1": (2, 3, 1), "6-16-16-1": (6, 16, 16, 1),
}  # fmt: skip


@cache
def estimates(name: str, kind: str, prior: str = "normal") -> tuple[Tensor, Tensor, Tensor]:
    """The ELBO [draws], and its gradients by μ and by ρ, [draws, P]; ten draws each."""
    sizes = NETWORKS[name]
    data = regression(sizes[0], 12 if sizes[0] == 2 else 48)
    FOUND.clear()
    q = doxa.fit(
        mlp(*sizes), data,
        Estimates(estimator=kind, samples=10, initial_std=STD, average=0, elbo_samples=1),
        likelihood=doxa.Gaussian(NOISE), init="given", members=MEMBERS, validation=None,
        prior=doxa.Normal(1.0) if prior == "normal" else doxa.StudentTPrior(4.0, 1.0),
        engine="stack", progress=False,
    )  # fmt: skip
    nested = [m.draws for m in q.model.net.modules() if isinstance(m, NestedLinear)]
    assert bool(nested) == (kind != "weights")
    values = torch.cat([value for value, _ in FOUND])
    mean, rho = (torch.cat([grads[k] for _, grads in FOUND]) for k in ("mean", "rho"))
    return values, mean, rho


def test_gradients_on_a_linear_network_are_unbiased() -> None:
    """Of two weights and a bias: six numbers at 4.5 standard errors each, 5e-5 in all."""
    x, y = regression()
    x = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    layer = mlp(2, 1)[0]
    mean = torch.cat([layer.weight[0], layer.bias]).detach()
    by_mean = x.T @ (y[:, 0] - x @ mean) / NOISE**2 - mean
    by_rho = 1 - STD**2 * (1 + x.square().sum(0) / NOISE**2)
    for got, wanted in zip(estimates("linear", "auto")[1:], (by_mean, by_rho), strict=True):
        error = 4.5 * got.std(0) / DRAWS**0.5
        assert ((got.mean(0) - wanted).abs() < error + 1e-12).all()  # by μ pairs ±ε are exact
        assert (error < 0.1 * wanted.abs().max()).all()  # it has some power


def test_weights_of_rows_count() -> None:
    """By μ a pair ±ε gives Xᵀ diag(w)(y − Xμ)/s² − μ itself, whatever ε is."""
    x, y = regression()
    weight = torch.arange(1.0, 13.0).double()
    FOUND.clear()
    q = doxa.fit(
        mlp(2, 1), (x, y), Estimates(samples=10, average=0, elbo_samples=1), init="given",
        likelihood=doxa.Gaussian(NOISE), prior=doxa.Normal(1.0), validation=None, progress=False,
        sample_weight=weight,
    )  # fmt: skip
    assert q.diagnostics["engine"] == "loop"  # ten draws are one pass of one member
    x = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    layer = mlp(2, 1)[0]
    mean = torch.cat([layer.weight[0], layer.bias]).detach()
    wanted = x.T @ (weight * (y[:, 0] - x @ mean)) / NOISE**2 - mean
    for _, grads in FOUND:
        torch.testing.assert_close(grads["mean"][0], wanted)


@pytest.mark.parametrize(
    ("name", "kind", "prior"),
    [
        ("2-3-1", "auto", "normal"), ("2-3-1", "local", "normal"), ("2-3-1", "auto", "student-t"),
        ("6-16-16-1", "auto", "normal"),
    ],
)  # fmt: skip
def test_the_elbo_and_its_gradient_are_those_of_weight_draws(
    name: str, kind: str, prior: str
) -> None:
    """At most 803 numbers at 5 standard errors of the difference each: 5e-4 in all."""
    for got, other in zip(
        estimates(name, kind, prior), estimates(name, "weights", prior), strict=True
    ):
        error = ((got.var(0) + other.var(0)) / DRAWS).sqrt()
        assert ((got.mean(0) - other.mean(0)).abs() < 5 * error).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2-3-1", "6-16-16-1"])
def test_ten_draws_have_less_variance_than_ten_of_the_weights(name: str) -> None:
    """Summed over the entries of each half of the gradient, though first layers share draws."""
    for nested, weights in zip(
        estimates(name, "auto")[1:], estimates(name, "weights")[1:], strict=True
    ):
        assert nested.var(0).sum() < 0.7 * weights.var(0).sum()


def test_the_fixed_point_on_a_linear_network() -> None:
    """The exact mean, and the precisions on the diagonal of the exact precision: six checks of the
    mean over 16 members at 4.5 standard errors (t with 15 degrees of freedom: 0.0025 in all)."""
    x, y = regression(count=30)
    q = doxa.fit(
        mlp(2, 1), (x, y), doxa.MeanField(samples=10), likelihood=doxa.Gaussian(NOISE),
        prior=doxa.Normal(1.0), members=16, batch_size=30, steps=1500, lr=0.02, progress=False,
        validation=None,
    )  # fmt: skip
    x = torch.cat([x, torch.ones(30, 1).double()], 1)
    precision = x.T @ x / NOISE**2 + torch.eye(3)
    mean = torch.linalg.solve(precision, x.T @ y[:, 0] / NOISE**2)
    logs = -precision.diagonal().log()
    for values, exact in ((q.mean, mean), (q.covariance.diagonal().log(), logs)):
        error = values.std(0) / 4
        assert ((values.mean(0) - exact).abs() < 4.5 * error + 1e-9).all()
        assert (error < 0.02).all()


FIT: dict[str, Any] = {"steps": 30, "progress": False, "likelihood": doxa.Gaussian(NOISE)}


def fitted(**options: Any) -> dict[str, Tensor]:
    method = doxa.MeanField(samples=10, elbo_samples=1)
    data = options.pop("data", None) or regression(6, 40)
    return doxa.fit(mlp(6, 16, 16, 1), data, method, **{**FIT, **options}).tensors()


def test_members_alone_and_together_agree() -> None:
    together = fitted(members=3, validation=None)
    for k in range(3):
        alone = fitted(members=[k], validation=None)
        for name in ("mean", "covariance.variance"):
            torch.testing.assert_close(alone[name][0], together[name][k], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", ["loop:eager", "loop:traced", "stack:eager", "stack:traced"])
def test_engines_agree(engine: str) -> None:
    for (name, value), want in zip(
        fitted(members=2, engine=engine).items(), fitted(members=2).values(), strict=True
    ):
        torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-11, msg=name)


def test_rows_that_only_pad_change_nothing() -> None:
    """Of two runs with 30 and 40 rows the shorter is padded: it is as it is alone."""
    x, y = regression(6, 40)
    runs = doxa.Runs(rows=[torch.arange(30), torch.arange(40)])
    options = {**FIT, "batch_size": 40, "validation": None}
    both = doxa.fit(
        mlp(6, 16, 16, 1), (x, y), doxa.MeanField(samples=10), runs=runs, **options
    )  # fmt: skip
    alone = doxa.fit(
        mlp(6, 16, 16, 1), (x[:30], y[:30]), doxa.MeanField(samples=10), **options
    )  # fmt: skip
    torch.testing.assert_close(both[0].mean, alone.mean, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(both[1].mean, alone.mean, rtol=1e-3)


def seen(net: nn.Module, x: Tensor, subset: Any = "all") -> doxa.Model:
    return doxa.Model(net.double(), subset=subset).build(x)


def test_the_rule() -> None:
    """As many draws of the first layer as the budget pays for, a part of the others', in pairs
    where all are; of the weights where that is less work."""

    def draws(samples: int, *sizes: int) -> tuple[int, ...] | None:
        model = seen(mlp(*sizes), torch.zeros(1, sizes[0]).double())
        found = nested_draws(model, samples)
        return None if found is None else tuple(found.values())

    assert draws(10, 784, 400, 400, 10) == (2, 10, 10)
    assert draws(100, 784, 400, 400, 10) == (50, 100, 100)
    assert draws(9, 784, 400, 400, 10) == (3, 9, 9)
    assert draws(4, 13, 50, 1) == (4, 4)
    assert draws(10, 8, 64, 64, 64, 64, 1) is None  # only the first layer shares draws
    assert draws(2, 784, 400, 400, 10) is None
    assert draws(1, 13, 50, 1) is None
    trunk = seen(mlp(3, 4, 4, 2), torch.zeros(1, 3).double(), "last_layer")
    assert nested_draws(trunk, 10) == {"4": 10}
    assert all_draws(seen(mlp(8, 64, 64, 1), normal(1, 8)), 10) == {"0": 10, "2": 10, "4": 10}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Twice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Rolled(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).roll(1, 0)


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    "net",
    [
        Residual(), Twice(), Rolled(), tied(), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)),
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 3, 3), nn.Flatten()),
    ],
    ids=["residual", "twice", "rows", "tied", "norm", "batch-norm", "conv"],
)  # fmt: skip
def test_other_networks_keep_draws_of_the_weights(net: nn.Module) -> None:
    """To the bit what `estimator="weights"` gives."""
    x = normal(12, 3)
    assert nested_draws(seen(net, x), 10) is None
    options = {"steps": 3, "progress": False, "init": "given", "validation": None}
    auto, weights = (
        doxa.fit(net, (x, x), doxa.MeanField(samples=4, estimator=kind, elbo_samples=1), **options)
        for kind in ("auto", "weights")
    )
    assert torch.equal(auto.mean, weights.mean)


def test_places_of_a_row_keep_draws_of_the_weights() -> None:
    """A linear layer on a sequence: local noise would be of each place's own."""
    assert nested_draws(seen(mlp(3, 4, 2), normal(2, 5, 3)), 10) is None
    assert nested_draws(seen(nn.Sequential(nn.Flatten(), *mlp(15, 4, 2)), normal(2, 5, 3)), 10)


@pytest.mark.slow
def test_ten_draws_take_less_than_four_gradients_of_a_point_estimate() -> None:
    """784-400-400-10: products as torch counts them, of ten steps; 3.05 by the rule's formula."""
    x, y = torch.rand(128, 784), torch.rand(128, 10)

    def products(method: Any, steps: int) -> int:
        with FlopCounterMode(display=False) as count:
            doxa.fit(
                mlp(784, 400, 400, 10).float(), (x, y), method, steps=steps, batch_size=128,
                validation=None, engine="loop:eager", progress=False,
            )  # fmt: skip
        return count.get_total_flops()

    def step(method: Any) -> int:
        return products(method, 3) - products(method, 2)

    one = step(doxa.MAP())
    assert step(doxa.MeanField(samples=10)) < 3.2 * one
    assert step(doxa.MeanField(samples=10, estimator="weights")) == 10 * one


def test_a_saved_posterior_predicts_the_same(tmp_path: Any) -> None:
    x, y = regression(6, 40)
    net = mlp(6, 16, 16, 1)
    q = doxa.fit(net, (x, y), doxa.MeanField(samples=10), **FIT)
    q.save(tmp_path / "q")
    again = doxa.load(tmp_path / "q", net=net)
    torch.testing.assert_close(again.predict(x).samples, q.predict(x).samples)
