"""On a GPU a step is recorded as a graph, or says beforehand that it cannot be.

A graph refuses what waits for the host or copies from it: see `pretend`, whose graphs need no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pretend
import pytest
import torch
from fast import defaults

import doxa
from doxa.errors import MethodError, ModelError
from doxa.method.method import rules

# Closed forms; and fbnn where it fits no kernel first and no noise last: its own step decomposes a
# matrix.
NEVER = {"linear", "gp", "nngp", "ntk", "fbnn-classification"}

NOT_HERE = {"hessian"}  # second derivatives reach for memory that a pretended tensor has none of


def recorded(case: Any) -> bool:
    return not NEVER & {case.name, case.method_and_task}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[pretend.Graph]]:
    with pretend.gpu(monkeypatch) as captured:
        yield captured


def fit(case: Any, mode: str = "graph", settings: Any = None, **options: Any) -> Any:
    if case.device != "cpu":
        pytest.skip("test_a_cuda_graph has it, on the GPU itself")
    lengths = {name: 4 for name in ("draws", "burn_in") if name in defaults(case.cls)}
    if "mean_correction" in defaults(case.cls):  # forward derivatives see through what is pretended
        lengths["mean_correction"] = False
    short = {"engine": f"stack:{mode}", "members": 2, "steps": 4, "device": pretend.DEVICE}
    return case.fit(settings=lengths | (settings or {}), **short, **options)


@pytest.mark.by_family
def test_a_step_is_recorded_or_says_that_it_is_not(
    case: Any, gpu: list[pretend.Graph], caplog: pytest.LogCaptureFixture
) -> None:
    fit(case)
    assert "running eagerly" not in caplog.text
    assert bool(gpu) == recorded(case), f"{len(gpu)} stages were recorded"


@pytest.mark.by_family
def test_a_graph_computes_what_its_step_does(case: Any) -> None:
    """To the bit: a number that Python read once would stay what it was."""
    if not recorded(case):
        pytest.skip("there is none")
    want, got = (fit(case, mode).tensors() for mode in ("eager", "graph"))
    for name, value in want.items():
        assert torch.equal(got[name].cpu(), value.cpu()), name


@pytest.mark.slow
def test_so_is_every_choice(trained_regression: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of each field that names choices, and of each switch; a method may refuse some of them."""
    case = trained_regression
    for name, rule in rules(case.cls).items():
        default = defaults(case.cls)[name]
        choices = [not default] if isinstance(default, bool) else getattr(rule, "choices", ())
        for choice in set(choices) - NOT_HERE:
            try:
                fit(case, settings={name: choice})
            except (MethodError, ModelError):
                continue
            assert "running eagerly" not in caplog.text, f"{name}={choice!r}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["half-cauchy", "inverse-gamma", "log-normal"])
@pytest.mark.parametrize("name", ["map", "mean-field"])  # one takes its score, one its density
def test_under_an_unknown_scale(name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its tables are looked up, by positions that must lie on the device as well."""
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    doxa.fit(
        doxa.nets.mlp(1, 1), (x, x.sin()), name, likelihood="gaussian", steps=3,
        prior=doxa.Hierarchical(kind), device=pretend.DEVICE, engine="stack:graph", progress=False,
    )  # fmt: skip
    assert "running eagerly" not in caplog.text


@pytest.mark.parametrize("name", ["hmc", "sgld"])
def test_a_bare_density(
    name: str, gpu: list[pretend.Graph], caplog: pytest.LogCaptureFixture
) -> None:
    """With what makes its parameters unconstrained."""
    starts = {"positive": 1.0, "unit": 0.4, "simplex": [0.2, 0.3, 0.5], "ordered": [-1.0, 2.0]}
    doxa.sample(
        lambda p: -sum(value.square().sum() for value in p.values()),
        {kind: torch.tensor(start, device=pretend.DEVICE) for kind, start in starts.items()},
        doxa.get_method(name)(draws=4, burn_in=4), members=2, constraints={k: k for k in starts},
        device=pretend.DEVICE, engine="stack:graph", progress=False,
    )  # fmt: skip
    assert "running eagerly" not in caplog.text
    assert len(gpu) == 2


REFUSED = {
    "a value that Python reads": lambda x: x * float(x.sum()),
    "a decision": lambda x: x if x.sum() > 0 else -x,
    "a list of values": lambda x: x * x.tolist()[0],
    "a mask": lambda x: x[x > 0].sum() + x,
    "rows by a list": lambda x: x[[1, 0, 2]],
    "a constant sent there": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "a constant on the host": lambda x: x + torch.ones(3).to(x.device),
    "a factor that is checked": lambda x: torch.linalg.cholesky(torch.diag(x.exp())).sum(0),
    "eigenvalues": lambda x: torch.linalg.eigh(torch.diag(x)).eigenvalues,
    "a solve that is checked": lambda x: torch.linalg.solve(torch.diag(x.exp()), x),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    x = torch.tensor([0.5, 1.0, 1.5], device=pretend.DEVICE)
    with pytest.raises(RuntimeError, match="refused"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        REFUSED[what](x)


def test_a_replay_reads_what_is_there_now() -> None:
    """Also through factors and triangular solves, which a graph does hold."""
    x = torch.tensor([0.5, 1.0, 1.5], device=pretend.DEVICE)

    def solved() -> torch.Tensor:
        lower = torch.linalg.cholesky_ex(torch.diag(x.exp()) + 0.1).L
        return torch.linalg.solve_triangular(lower, x.unsqueeze(1), upper=False).square().sum()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = solved()
    before = held.item()
    x.mul_(2.0)
    graph.replay()
    assert held.item() == solved().item() != before


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=pretend.DEVICE) + torch.ones(3)
