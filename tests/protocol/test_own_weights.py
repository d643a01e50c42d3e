"""A method whose `prepare` makes other weights: what it sees is the same in a fit and on loading,
and the contract does not compare its weights with those of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from trial import curve, held_to_the_protocol

import doxa
from doxa import store
from doxa.errors import MethodError, ModelError, StoreError
from doxa.method import Method, Problem, Run, Stage, State, log_joint, optimise
from doxa.model.model import FACTS
from doxa.posterior import Posterior, SamplePosterior

SEEN: list[dict[str, Any]] = []


@store.register("test-halved")
@dataclass(frozen=True)
class Halved(Method):
    """MAP with half of the hidden units; `prepare` records what it sees."""

    name: ClassVar[str] = "test-halved"
    own_weights: ClassVar[bool] = True

    def prepare(self, problem: Problem) -> Problem:
        net = problem.net
        SEEN.append(
            {name: getattr(net, name) for name in FACTS if name != "subset"}
            | {
                "subset": net.subset_names, "likelihood": net.likelihood, "prior": net.prior,
                "layout": net.layout.entries, "dtype": net.dtype, "terms": net.terms,
                "layers": [(name, str(layer)) for name, layer in net.net.named_modules()],
                "momenta": net.momenta, "problem": type(problem), "named": net.named,
                "modules": dict(problem.modules), "partial": problem.partial,
                "batch_norm": problem.batch_norm, "fixed": sorted(net.fixed),
                "width": net.width(), "assumed": net.assumed,
            }
        )  # fmt: skip
        first = next(name for name in net.calls if name != "other")

        def rule(name: str, layer: nn.Module) -> nn.Module | None:
            if isinstance(layer, nn.BatchNorm1d):
                return nn.BatchNorm1d(layer.num_features // 2)
            if not isinstance(layer, nn.Linear) or name == "other":
                return None
            inputs = layer.in_features if name == first else layer.in_features // 2
            outputs = layer.out_features if name == net.head else layer.out_features // 2
            return nn.Linear(inputs, outputs)

        return problem.rewrite(rule, ("*.weight",) if net.subset == "all" else None)

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(log_joint, run.steps)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        samples = state["theta"].unsqueeze(1)
        return SamplePosterior(samples=samples, **run.common(self), **run.shared(state))


def network(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 6),
            nn.Tanh(), nn.Linear(6, outputs),
        )  # fmt: skip


class Named(nn.Module):
    """A network with two named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = network(), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"more": self.other(x), "mean": self.body(x)}


MODELS: dict[str, Callable[[nn.Module], Any]] = {
    "defaults": lambda net: net,
    "a prior": lambda net: doxa.Model(net, doxa.Gaussian(noise=0.3), doxa.Normal(2.0)),
    "the last layer": lambda net: doxa.Model(net, "gaussian", subset="last_layer"),
    "a predicate": lambda net: doxa.Model(
        net, "student-t", subset=lambda name: name.endswith("weight")
    ),
    "two numbers": lambda net: doxa.Model(net, "heteroscedastic"),
    "named": lambda net: doxa.Model(net, "gaussian", output="mean"),
}


def fresh_network(kind: str) -> nn.Module:
    return Named() if kind == "named" else network(2 if kind == "two numbers" else 1)


@pytest.mark.parametrize("kind", MODELS)
def test_prepare_sees_the_same_on_loading(kind: str, tmp_path: Path) -> None:
    """Else it would see what it made itself: narrower layers, and another subset."""
    SEEN.clear()
    model = MODELS[kind](fresh_network(kind))
    posterior = doxa.fit(model, curve(), Halved(), steps=3, members=2, progress=False)
    posterior.save(tmp_path / "one")
    again = doxa.load(tmp_path / "one", net=fresh_network(kind))
    again.save(tmp_path / "two")
    doxa.load(tmp_path / "two", net=fresh_network(kind))
    first, *later = SEEN
    assert len(later) == 2
    for seen in later:
        assert seen.keys() == first.keys()
        for name, value in first.items():
            assert seen[name] == value, name
    assert dict(first["widths"])["body.0" if kind == "named" else "0"] == 8
    assert torch.equal(again.predict(curve()[0]).mean, posterior.predict(curve()[0]).mean)


def test_so_it_does_for_a_network_of_a_builder(tmp_path: Path) -> None:
    """It is also prepared without memory first, to check sizes."""
    SEEN.clear()
    net = doxa.nets.mlp(1, 1, hidden=(8, 6))
    posterior = doxa.fit(net, curve(), Halved(), steps=3, progress=False)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    assert len(SEEN) == 3 and SEEN[1] == SEEN[0] == SEEN[2]
    assert torch.equal(again.predict(curve()[0]).mean, posterior.predict(curve()[0]).mean)


def test_damaged_facts_are_refused(tmp_path: Path) -> None:
    posterior = doxa.fit(doxa.nets.mlp(1, 1, hidden=(8, 6)), curve(), Halved(), steps=2)
    del posterior.model.given_facts["widths"]
    posterior.save(tmp_path / "run")
    with pytest.raises(StoreError, match="what the method saw"):
        doxa.load(tmp_path / "run")


def test_it_is_held_to_the_protocol(tmp_path: Path) -> None:
    net = doxa.nets.mlp(1, 1, hidden=(16, 8))
    posterior = held_to_the_protocol(net, curve(), Halved(), tmp_path)
    shapes = {name: tuple(v.shape[1:]) for name, v in posterior.draw().items()}
    assert shapes["2.weight"] == (4, 8)


def test_the_networks_weights_are_not_a_start_but_a_posterior_is() -> None:
    net, x_y = doxa.nets.mlp(1, 1, hidden=(8, 6)), curve()
    with pytest.raises(MethodError, match="init='fresh'"):
        doxa.fit(net, x_y, Halved(), init="given", steps=2)
    first = doxa.fit(net, x_y, Halved(), steps=20, progress=False)
    later = doxa.fit(net, x_y, Halved(), init=first, steps=2, lr=1e-12, progress=False)
    assert torch.allclose(later.point(), first.point(), atol=1e-8)


def test_layers_that_prepare_makes_do_not_move_the_generator() -> None:
    """`nn.Linear` draws its weights, in a fit and on loading."""
    net = network()
    before = torch.get_rng_state()
    doxa.fit(net, curve(), Halved(), steps=2, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_that_it_cannot_narrow_is_an_error_of_the_model() -> None:
    odd = nn.Sequential(nn.Linear(1, 8), nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, 1))
    with pytest.raises(ModelError):
        doxa.fit(odd, curve(), Halved(), steps=2)
