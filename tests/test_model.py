"""Any network: what a `Model` makes of it, held against the network itself run by hand."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import cross_entropy

import doxa
from doxa import Engine
from doxa.errors import ModelError
from doxa.optim import SGD

QUICK = {"steps": 5, "progress": False}
METHODS = {
    "map": doxa.MAP(),
    "mean-field": doxa.MeanField(),
    "mc-dropout": doxa.MCDropout(insert="all"),
    "laplace": doxa.Laplace(structure="diagonal"),
    "hmc": doxa.HMC(draws=2, burn_in=2, leapfrog=2),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return build()


class TwoInputs(nn.Module):
    """f(a, b): one input is an integer that picks an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.table = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out(torch.tanh(self.left(a)) * self.table(b))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 6)
        self.value = nn.Linear(6, 1)
        self.kind = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.value(h), self.kind(h)


class Tied(nn.Module):
    """One matrix used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Scaled(nn.Module):
    """A buffer that the forward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 10.0, 100.0]))
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x / self.scale)


class Bare(nn.Module):
    """A parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((1,), 0.5))
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) + self.offset


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


ARCHITECTURES: dict[str, tuple[Any, str, Any, Any]] = {
    "two inputs": (
        TwoInputs, "gaussian",
        (numbers(12, 3), torch.arange(12) % 5), numbers(12, 1, seed=1),
    ),
    "two inputs by name": (
        TwoInputs, "gaussian",
        {"b": torch.arange(12) % 5, "a": numbers(12, 3)}, numbers(12, 1, seed=1),
    ),
    "tied": (Tied, "gaussian", numbers(12, 3), numbers(12, 1, seed=1)),
    "buffer": (Scaled, "gaussian", numbers(12, 3), numbers(12, 1, seed=1)),
    "bare parameter": (Bare, "gaussian", numbers(12, 3), numbers(12, 1, seed=1)),
    "lstm": (Recurrent, "gaussian", numbers(12, 5, 2), numbers(12, 1, seed=1)),
    "convolutions": (classifier, "categorical", numbers(12, 1, 6, 6), torch.arange(12) % 3),
    "segmentation": (
        segmenter, "categorical", numbers(6, 1, 5, 4), torch.arange(120).reshape(6, 5, 4) % 3,
    ),
    "a map of numbers": (
        lambda: nn.Conv1d(2, 3, 3, padding=1), "gaussian",
        numbers(8, 2, 7), numbers(8, 3, 7, seed=1),
    ),
}  # fmt: skip


def call(net: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return net(**x)
    return net(*x) if isinstance(x, tuple) else net(x)


def by_hand(net: nn.Module, draws: dict[str, Tensor], x: Any, s: int) -> Any:
    """The user's own network with one draw's weights."""
    copied = copy.deepcopy(net).eval()
    named = dict(copied.named_parameters())
    with torch.no_grad():
        for name, value in draws.items():
            if name in named:
                named[name].copy_(value[s])
        return call(copied, x)


@pytest.mark.parametrize("method", ["map", "mean-field", "hmc"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sample_is_the_network_at_a_draw(name: str, method: str) -> None:
    build, likelihood, x, y = ARCHITECTURES[name]
    net = seeded(build)
    posterior = doxa.fit(net, (x, y), METHODS[method], likelihood=likelihood, members=2, **QUICK)
    draws, p = posterior.draw(2), posterior.predict(x, n=2)
    for s in range(2):
        torch.testing.assert_close(p.samples[s], by_hand(net, draws, x, s), rtol=1e-4, atol=1e-5)
    shape = y.shape if likelihood == "gaussian" else (y.shape[0], 3, *y.shape[1:])
    assert p.mean.shape == shape
    assert p.log_prob(y).shape == y.shape[:1]
    assert not torch.equal(p.samples[0], p.samples[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_kind_of_method_takes_it_stacked_or_in_a_loop(name: str, method: str) -> None:
    build, likelihood, x, y = ARCHITECTURES[name]
    net = seeded(build)
    if method == "mc-dropout" and name == "lstm":
        pytest.skip("masks go before linear and convolutional layers; see the dropout tests")
    fits = [
        doxa.fit(net, (x, y), METHODS[method], likelihood=likelihood, members=2, engine=engine,
                 dtype=torch.float64, **QUICK | {"steps": 2})
        for engine in ("auto", Engine("loop"))
    ]  # fmt: skip
    for a, b in zip(*(post.tensors().items() for post in fits), strict=True):
        torch.testing.assert_close(a[1], b[1], rtol=1e-8, atol=1e-10, msg=a[0])
    x_mean = [post.predict(x, keep="moments").mean for post in fits]
    torch.testing.assert_close(*x_mean, rtol=1e-8, atol=1e-8)


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


def test_several_heads() -> None:
    net = seeded(TwoHeads)
    x, y = numbers(20, 2), (numbers(20, 1, seed=1), torch.arange(20) % 3)
    likelihood = (doxa.Gaussian(noise=0.5), "categorical")
    model = doxa.Model(net, likelihood).build(x)
    params = {name: p.detach() for name, p in net.named_parameters()}
    value, kind = net(x)
    each = Normal(value, 0.5).log_prob(y[0]).sum(1) - cross_entropy(kind, y[1], reduction="none")
    torch.testing.assert_close(model.log_likelihood(params, x, y), each)


@pytest.mark.parametrize("method", METHODS)
def test_heads_predict_each_for_itself(method: str, tmp_path: Path) -> None:
    net = seeded(TwoHeads)
    x, y = numbers(20, 2), (numbers(20, 1, seed=1), torch.arange(20) % 3)
    posterior = doxa.fit(
        net, (x, y), METHODS[method], likelihood=("gaussian", "categorical"), members=2,
        validation=0.2, **QUICK,
    )  # fmt: skip
    p = posterior.predict(x)
    assert len(p.heads) == 2
    assert p.heads[0].mean.shape == (20, 1)
    assert p.heads[1].probs.shape == (20, 3)
    with pytest.raises(doxa.errors.Unavailable, match="heads"):
        _ = p.mean
    score = p.heads[0].log_prob(y[0]) + p.heads[1].log_prob(y[1])
    assert posterior.validation is not None
    assert abs(posterior.validation - float(score.mean())) < 1.0  # of a few of the same rows
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net).predict(x)
    assert torch.equal(again.heads[1].probs, p.heads[1].probs)


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


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_batch_norm_trains_as_it_does_in_torch(engine: str) -> None:
    """The prior is so wide that the objective is the mean loss; every batch is all rows."""
    net = seeded(norm_net)
    x, y = numbers(16, 3).double() + 2, numbers(16, 1, seed=1).double()
    posterior = doxa.fit(
        net, (x, y), "map", likelihood=doxa.Gaussian(noise=1.0), prior=doxa.Normal(1e8),
        init="given", members=2, optimizer=SGD(0.0), lr=0.1, schedule="constant", steps=4,
        engine=engine,
    )  # fmt: skip
    torch_net = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(torch_net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (0.5 * (torch_net(x) - y).square().mean()).backward()
        optimizer.step()
    torch_net.eval()
    for k in range(2):
        assert posterior.buffers["1.num_batches_tracked"][k] == 4
        torch.testing.assert_close(
            posterior.buffers["1.running_mean"][k], torch_net[1].running_mean
        )
        torch.testing.assert_close(posterior.buffers["1.running_var"][k], torch_net[1].running_var)
    f = posterior.predict(x).samples
    torch.testing.assert_close(f[0], torch_net(x).detach())
    torch.testing.assert_close(f[1], torch_net(x).detach())


def test_each_member_has_its_own_batch_norm_buffers(tmp_path: Path) -> None:
    net = seeded(norm_net)
    x, y = numbers(32, 3).double(), numbers(32, 1, seed=1).double()
    options = {"batch_size": 8, "steps": 20}
    posterior = doxa.fit(net, (x, y), "map", members=3, **options)
    means = posterior.buffers["1.running_mean"]
    assert means.shape == (3, 5)
    assert not torch.equal(means[0], means[1])
    assert torch.equal(net[1].running_mean, torch.zeros(5).double())
    alone = doxa.fit(net, (x, y), "map", members=[2], **options)
    torch.testing.assert_close(alone.buffers["1.running_mean"][0], means[2])
    torch.testing.assert_close(alone.predict(x).mean, posterior.predict(x).samples[2])
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net)
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_predictions_do_not_depend_on_the_batch(method: str) -> None:
    x, y = numbers(32, 3).double(), numbers(32, 1, seed=1).double()
    posterior = doxa.fit(seeded(norm_net), (x, y), METHODS[method], members=2, **QUICK)
    whole, part = posterior.predict(x).mean, posterior.predict(x[3:4]).mean
    torch.testing.assert_close(part, whole[3:4], rtol=1e-9, atol=1e-12)


def test_frozen_batch_norm_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "doxa")
    x, y = numbers(16, 3).double(), numbers(16, 1, seed=1).double()
    for method in ("hmc", "laplace"):
        caplog.clear()
        doxa.fit(seeded(norm_net), (x, y), METHODS[method], **QUICK)
        assert "BatchNorm" in caplog.text


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_chains_sample_the_density_that_predictions_come_from(subset: str) -> None:
    """The last draw's log joint by hand, with the buffers that the posterior keeps."""
    net = seeded(norm_net)
    x, y = numbers(16, 3).double() + 2, numbers(16, 1, seed=1).double()
    posterior = doxa.fit(
        net, (x, y), METHODS["hmc"], likelihood=doxa.Gaussian(noise=0.7), subset=subset, members=2,
        steps=20, batch_size=8,
    )  # fmt: skip
    reached = posterior.history["log_density"][-1][1]
    f = posterior.predict(x).samples[1::2]  # the second and last draw of each chain
    draws = {name: v[1::2] for name, v in posterior.draw().items()}
    for k in range(2):
        prior = sum(
            Normal(1.0 if name == "1.weight" else 0.0, 1.0).log_prob(v[k]).sum()
            for name, v in draws.items()
        )
        joint = prior + Normal(f[k], 0.7).log_prob(y).sum()
        assert float(joint) == pytest.approx(reached[k], rel=1e-9)


def dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 1, bias=False)
    )


def test_dropout_is_on_in_training_and_off_in_prediction() -> None:
    """With the first layer frozen the net is linear in the masked features, so that one SGD step
    shows the masks: a weight whose feature was dropped in every row has no gradient."""
    net = seeded(dropout_net)
    net[0].requires_grad_(False)
    x, y = numbers(1, 3), numbers(1, 1, seed=1) + 3
    start = net[3].weight.detach().clone()
    options = {
        "likelihood": doxa.Gaussian(noise=1.0), "prior": doxa.Normal(1e8), "init": "given",
        "optimizer": SGD(0.0), "lr": 0.1, "schedule": "constant", "steps": 1,
    }  # fmt: skip
    posterior = doxa.fit(net, (x, y), "map", **options)
    moved = (posterior.draw(1)["3.weight"][0] - start)[0]
    h = torch.relu(net[0](x))[0].detach()
    alive = h > 0
    dropped = (moved == 0) & alive
    assert 0 < int(dropped.sum()) < int(alive.sum())
    kept = alive & ~dropped
    ratio = moved[kept] / h[kept]  # lr × residual / (1 − p), the same for every kept feature
    assert torch.allclose(ratio, ratio[:1], rtol=1e-4)
    masked = torch.where(dropped, 0.0, h / 0.75)
    residual = (y - masked @ start[0])[0, 0]
    assert float(ratio[0]) == pytest.approx(0.1 * float(residual) / 0.75, rel=1e-4)
    f = posterior.predict(x).samples[0]
    torch.testing.assert_close(f, (h @ posterior.draw(1)["3.weight"][0].T)[None])


def test_monte_carlo_dropout_drops_as_often_as_the_layer_says() -> None:
    """The variance over masks of Σ w_j h_j z_j / (1 − p) is Σ (w_j h_j)² p / (1 − p)."""
    net = seeded(dropout_net)
    x, y = numbers(4, 3), numbers(4, 1, seed=1)
    posterior = doxa.fit(net, (x, y), "mc-dropout", init="given", lr=1e-12, **QUICK)
    assert set(posterior.rates) == {"2"}
    assert float(posterior.rates["2"][0]) == 0.25
    f = posterior.functions(x, 4000)[..., 0].double()
    terms = (torch.relu(net[0](x)) * net[3].weight).detach().double()  # [N, 64]
    spread = (terms.square() * (0.25 / 0.75)).sum(1)
    # five standard errors of a mean and of a variance over 4000 nearly normal draws
    assert ((f.mean(0) - terms.sum(1)).abs() < 5 * (spread / 4000).sqrt()).all()
    assert ((f.var(0) / spread - 1).abs() < 5 * math.sqrt(2 / 4000)).all()


def test_dropout_is_inserted_where_there_is_none() -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1, hidden=(4, 4)))
    x, y = numbers(12, 3), numbers(12, seed=1)
    sites = {
        insert: set(doxa.fit(net, (x, y), doxa.MCDropout(p=0.3, insert=insert), **QUICK).rates)
        for insert in ("hidden", "all")
    }
    assert sites == {
        "hidden": {"2.dropout", "4.dropout"},
        "all": {"0.dropout", "2.dropout", "4.dropout"},
    }
    with pytest.raises(ModelError, match="dropout"):
        doxa.fit(net, (x, y), doxa.MCDropout(insert="never"), **QUICK)
    assert type(net[0]) is nn.Linear


def test_channel_dropout_drops_whole_channels() -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(1, 6, 1), nn.Dropout2d(0.5), nn.Conv2d(6, 6, 1)))
    nn.init.ones_(net[0].weight)
    nn.init.zeros_(net[2].bias)
    net[2].weight.data = torch.eye(6)[:, :, None, None]
    x = torch.ones(4, 1, 3, 3)
    posterior = doxa.fit(
        net, (x, numbers(4, 6, 3, 3)), "mc-dropout", init="given", lr=1e-12, **QUICK
    )
    f = posterior.functions(x, 50)  # [S, N, channel, 3, 3]
    assert torch.allclose(f, f[:, :1, :, :1, :1].expand_as(f))
    share = float((f[:, 0, :, 0, 0].abs() < 1e-6).double().mean())
    assert abs(share - 0.5) < 5 * math.sqrt(0.25 / 300)


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


def test_a_subset_must_select_something() -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1))
    data = (numbers(12, 3), numbers(12))
    with pytest.raises(ModelError, match="selects no parameter"):
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
    draws = doxa.fit(model, (x, y), "map", steps=300, lr=0.05).draw()
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
