"""A `Model` is a joint density: held against torch's own densities, optimisers and layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import METHODS, QUICK, Bare, Tied, numbers, seeded
from scipy import stats
from torch import Tensor, nn
from torch.distributions import Normal

import doxa
from doxa.errors import ModelError
from doxa.optim import SGD


def test_the_model_is_the_joint_density_of_its_parts() -> None:
    net = seeded(
        lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 1))
    )
    x, y = numbers(7, 2), numbers(7, 1, seed=1)
    model = doxa.Model(net, doxa.Gaussian(noise=0.3), prior=doxa.Normal(0.7)).build(x)
    params = {name: p.detach() for name, p in net.named_parameters()}
    torch.testing.assert_close(model.forward(params, x), net(x))
    each = Normal(net(x), 0.3).log_prob(y).sum(1)
    torch.testing.assert_close(model.log_likelihood(params, x, y), each)
    prior = sum(
        Normal(1.0 if name == "1.weight" else 0.0, 0.7).log_prob(p).sum()  # LayerNorm's scale
        for name, p in params.items()
    )
    torch.testing.assert_close(model.log_prior(params), prior)
    torch.testing.assert_close(model.log_joint(params, x, y), prior + each.sum())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.both(x)
        return f[:, :1], f[:, 1:]


@pytest.mark.parametrize("first", [doxa.Gaussian(), doxa.Gaussian(noise=0.3)], ids=str)
@pytest.mark.parametrize("df", [None, 4.0])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_given_and_learned_parameters_of_a_likelihood_together(
    first: doxa.Gaussian, df: float | None, scale: float | None
) -> None:
    """scipy's densities at the learned ones' starting values: σ = s = 1, v = 2 + 4."""
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()
    y = (x[:, :1], x[:, 1:])
    student = doxa.StudentT(df=df, scale=scale)
    model = doxa.Model(TwoHeads().double(), (first, student)).build(x)
    params = {k: v.detach() for k, v in model.layout.unflatten(model.given()).items()}
    normal, heavy = (f.detach().numpy() for f in model.forward(params, x))
    each = stats.norm.logpdf(y[0], normal, first.noise or 1.0)
    each = each + stats.t.logpdf(y[1], df or 6.0, heavy, scale or 1.0)
    got = model.log_likelihood(params, x, y)
    torch.testing.assert_close(got, torch.from_numpy(each[:, 0]))
    joint = model.log_prior(params) + got.sum()
    torch.testing.assert_close(model.log_joint(params, x, y), joint)
    alone = doxa.Model(nn.Linear(2, 1).double(), student).build(x)
    params = alone.layout.unflatten(alone.given())
    f = alone.forward(params, x).detach().numpy()
    want = torch.from_numpy(stats.t.logpdf(y[0], df or 6.0, f, scale or 1.0)[:, 0])
    torch.testing.assert_close(alone.log_likelihood(params, x, y[0]), want)


def test_shared_parameters_are_counted_once() -> None:
    net = seeded(Tied)
    model = doxa.Model(net).build(numbers(1, 3))
    assert model.layout.names == ("first.weight", "out.weight", "out.bias", "likelihood.log_noise")
    posterior = doxa.fit(net, (numbers(12, 3), numbers(12, 1, seed=1)), **QUICK)
    assert set(posterior.draw(1)) == set(model.layout.names)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_parameters_stay_and_are_not_uncertain(method: str, tmp_path: Path) -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1, hidden=(4, 4), activation="tanh")).double()
    net[0].requires_grad_(False)
    frozen = net[0].weight.clone()
    x, y = numbers(12, 3).double(), numbers(12, seed=1).double()
    posterior = doxa.fit(net, (x, y), METHODS[method], **QUICK)
    assert not any(name.startswith("0.") for name in posterior.layout.names)
    assert torch.equal(net[0].weight, frozen)
    assert torch.equal(posterior.model.fixed["0.weight"], frozen)
    posterior.save(tmp_path / "run")
    single = copy.deepcopy(net).float()  # the frozen values come from the file, in float64
    nn.init.zeros_(single[0].weight)
    again = doxa.load(tmp_path / "run", net=single)
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


def test_a_network_that_is_all_frozen_is_refused() -> None:
    net = nn.Linear(3, 1).requires_grad_(False)
    with pytest.raises(ModelError, match="requires_grad"):
        doxa.fit(net, (numbers(12, 3), numbers(12, 1)), **QUICK)


SUBSETS: dict[str, tuple[Any, set[str]]] = {
    "last layer": ("last_layer", {"4.weight", "4.bias"}),
    "predicate": (lambda name: name.endswith("bias"), {"0.bias", "2.bias", "4.bias"}),
    "all": ("all", {f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")}),
}


@pytest.mark.parametrize("method", ["mean-field", "hmc", "laplace"])
@pytest.mark.parametrize("subset", SUBSETS)
def test_only_the_subset_is_uncertain(subset: str, method: str, tmp_path: Path) -> None:
    given, names = SUBSETS[subset]
    net = seeded(lambda: doxa.nets.mlp(3, 1, hidden=(5, 4), activation="tanh"))
    x, y = numbers(20, 3), numbers(20, seed=1)
    chosen = {**METHODS, "hmc": doxa.HMC(draws=6, burn_in=0, leapfrog=3)}[method]
    posterior = doxa.fit(net, (x, y), chosen, subset=given, members=1, **QUICK | {"steps": 20})
    draws = posterior.draw(6)
    varies = {name for name, v in draws.items() if not torch.equal(v[0].expand_as(v), v)}
    assert {name for name in varies if not name.startswith("likelihood.")} == names
    start = net.state_dict()
    for name in start:  # the others are point estimates: trained, not left where they were
        assert not torch.equal(draws[name][0], start[name]), name
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


@pytest.mark.slow
@pytest.mark.parametrize("subset", SUBSETS)
def test_a_subset_can_be_traced(subset: str, caplog: pytest.LogCaptureFixture) -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1, hidden=(5, 4), activation="tanh"))
    data = (numbers(20, 3).double(), numbers(20, seed=1).double())
    eager, traced = (
        doxa.fit(net, data, "mean-field", subset=SUBSETS[subset][0], engine=engine,
                 dtype=torch.float64, **QUICK)
        for engine in ("stack:eager", "stack:traced")
    )  # fmt: skip
    assert "running eagerly" not in caplog.text
    assert traced.diagnostics["mode"] == "traced"
    torch.testing.assert_close(traced.mean, eager.mean, rtol=1e-9, atol=1e-12)


def test_a_subset_must_select_something() -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1))
    data = (numbers(12, 3), numbers(12))
    with pytest.raises(ModelError, match="selects no trainable parameter"):
        doxa.fit(net, data, "mean-field", subset=lambda name: False, **QUICK)
    with pytest.raises(ModelError, match="subset"):
        doxa.fit(net, data, "mean-field", subset="first_layer", **QUICK)


def test_features_are_what_goes_into_the_last_layer() -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 2, hidden=(5, 4), activation="tanh"))
    x, y = numbers(12, 3), numbers(12, 2, seed=1)
    model = doxa.Model(net).build(x)
    params = dict(net.named_parameters())
    torch.testing.assert_close(model.features(params, x), net[:4](x))
    torch.testing.assert_close(model.features(params, x, layer="2"), net[:2](x))
    with pytest.raises(ModelError, match="no layer named 'nine'"):
        model.features(params, x, layer="nine")
    posterior = doxa.fit(net, (x, y), "map", members=2, **QUICK)
    draws = posterior.draw(2)
    each = []
    for s in range(2):
        copied = copy.deepcopy(net)
        copied.load_state_dict({k: v[s] for k, v in draws.items() if "likelihood" not in k})
        each.append(copied[:4](x).detach())
    torch.testing.assert_close(posterior.features(x), (each[0] + each[1]) / 2)


@pytest.mark.parametrize("members", [1, 3])
def test_parameters_that_cannot_be_made_fresh_are_said_once(
    members: int, caplog: pytest.LogCaptureFixture
) -> None:
    net = seeded(Bare)
    data = (numbers(12, 3), numbers(12, 1, seed=1))
    posterior = doxa.fit(net, data, "map", members=members, lr=1e-12, **QUICK)
    said = [record.getMessage() for record in caplog.records if "fresh" in record.getMessage()]
    assert len(said) == 1
    assert "offset" in said[0]
    assert "out." not in said[0]
    draws = posterior.draw()
    assert torch.allclose(draws["offset"], torch.tensor(0.5))
    if members > 1:
        assert not torch.allclose(draws["out.weight"][0], draws["out.weight"][1])
    caplog.clear()
    doxa.fit(net, data, "map", init="given", **QUICK)
    assert "fresh" not in caplog.text


def test_given_weights_are_the_start() -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1))
    posterior = doxa.fit(
        net, (numbers(12, 3), numbers(12)), "map", init="given", members=2, lr=1e-12, **QUICK
    )
    for name, value in net.state_dict().items():
        assert torch.allclose(posterior.draw()[name], value)


def test_a_prior_by_name() -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1, hidden=(4,)))
    x, y = numbers(50, 3), numbers(50, seed=1)
    prior = {"0.*": doxa.Normal(1e-3), "*.bias": doxa.LaplacePrior(2.0), "*": doxa.Normal(3.0)}
    model = doxa.Model(net, doxa.Gaussian(noise=1.0), prior).build(x)
    params = {name: p.detach() for name, p in net.named_parameters()}
    by_hand = (
        Normal(0, 1e-3).log_prob(params["0.weight"]).sum()
        + Normal(0, 1e-3).log_prob(params["0.bias"]).sum()  # the first pattern that matches counts
        + Normal(0, 3.0).log_prob(params["2.weight"]).sum()
        + torch.distributions.Laplace(0.0, 2.0).log_prob(params["2.bias"]).sum()
    )
    torch.testing.assert_close(model.log_prior(params), by_hand)
    draws = doxa.fit(model, (x, y), "map", steps=300, lr=0.05, validation=None).draw()
    assert draws["0.weight"].abs().max() < 0.01 < draws["2.bias"].abs().max()
    with pytest.raises(ModelError, match="matches no parameter"):
        doxa.fit(net, (x, y), "map", prior={"9.*": doxa.Normal(1.0)}, **QUICK)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_a_gaussian_prior_is_weight_decay(kind: str) -> None:
    """Minimising −log joint / n is the mean loss with weight decay 1 / (s² n)."""
    net = seeded(lambda: doxa.nets.mlp(3, 1, hidden=(6,), activation="tanh")).double()
    n, noise, std, rate = 24, 0.5, 0.3, 0.02
    x, y = numbers(n, 3).double(), numbers(n, 1, seed=1).double()
    ours = {"sgd": SGD(0.0), "momentum": SGD(0.9), "adam": "adam"}[kind]
    posterior = doxa.fit(
        net, (x, y), "map", likelihood=doxa.Gaussian(noise=noise), prior=doxa.Normal(std),
        init="given", optimizer=ours, lr=rate, schedule="constant", steps=10, batch_size=n,
        validation=None,
    )  # fmt: skip
    theirs = copy.deepcopy(net)
    decay = 1 / (std**2 * n)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(
        theirs.parameters(), lr=rate, weight_decay=decay
    )
    if kind != "adam":
        momentum = 0.9 if kind == "momentum" else 0.0
        optimizer = torch.optim.SGD(
            theirs.parameters(), lr=rate, momentum=momentum, weight_decay=decay
        )
    for _ in range(10):
        optimizer.zero_grad()
        (0.5 * ((theirs(x) - y) / noise).square().mean()).backward()
        optimizer.step()
    draw = posterior.draw(1)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(draw[name][0], value, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(draw[name][0], net.state_dict()[name])


def test_layers_are_replaced_on_a_copy() -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1, activation="relu"))
    x = numbers(5, 3)
    model = doxa.Model(net)
    changed = model.rewrite(lambda name, layer: nn.Tanh() if isinstance(layer, nn.ReLU) else None)
    params = dict(net.named_parameters())
    torch.testing.assert_close(model.forward(params, x), net(x))
    torch.testing.assert_close(changed.forward(params, x), net[2](torch.tanh(net[0](x))))
    assert isinstance(net[1], nn.ReLU)
