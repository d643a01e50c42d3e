"""Every registered method × every task it has, as fixtures that a test asks for by name.

`case` is all of them, `trained` those that train a network, `regression` and `classification` one
task; each runs on the CPU and, marked `gpu`, on a GPU. A method joins by its row in the registry,
which also says what makes it quick; `fast` derives the rest from its fields.

What is quick for every method, on its first task, is what its own file can get wrong: its fields,
what it predicts and in which units, noise and hyper-parameters of each member and run, chunks of
members, subsets, row weights, BatchNorm, saving, and one interruption; the first method of each
family and kind of answer has all its tasks. A test marked `by_family` checks what methods share
(the driver, the engines, runs, checkpoints at other moments): there these first methods stand for
the others. The rest of the matrix is `slow`. A fault of the shared parts is almost surely seen on
some representative, and the slow suite has them all.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from families import first_of_each
from fast import Fast, fast, trains
from torch import Tensor

import doxa
from doxa.registry import Row

N = 40
STEPS = 20


@dataclass(frozen=True)
class Case:
    """One method on one task, somewhere."""

    row: Row
    task: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.row.name}-{self.task}" + ("" if self.device == "cpu" else f"-{self.device}")

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def regression(self) -> bool:
        return self.task == "regression"

    @property
    def fast(self) -> Fast:
        return fast(self.name)

    @property
    def cls(self) -> Any:
        return doxa.get_method(self.name)

    @property
    def trains(self) -> bool:
        return trains(self.row)

    def method(self, **settings: Any) -> Any:
        return self.cls(**{**self.fast.settings, **settings})

    def net(self) -> Any:
        return make_net(1 if self.regression else 3) if self.trains else None

    def data(self) -> tuple[Tensor, Tensor]:
        return make_data(self.task)

    def fit(self, data: Any = None, *, settings: Any = None, **options: Any) -> Any:
        """`doxa.fit` on the case's data; options are `fit`'s and win over the defaults here."""
        chosen = {
            "likelihood": "gaussian" if self.regression else "categorical",
            "steps": STEPS,
            "batch_size": 16,
            "standardize": True,
            "device": self.device,
            "dtype": torch.float32,
            "progress": False,
            **options,
        }
        network = chosen.pop("net") if "net" in chosen else self.net()
        method = self.method(**(settings or {}))
        return doxa.fit(network, self.data() if data is None else data, method, **chosen)

    def posterior(self, dtype: torch.dtype = torch.float32) -> Any:
        """A fit that tests share: do not change it."""
        return shared_posterior(self, dtype)


@cache
def shared_posterior(case: Case, dtype: torch.dtype) -> Any:
    return case.fit(dtype=dtype)


def make_net(outputs: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return doxa.nets.mlp(2, outputs, hidden=(8,), activation="tanh")


def make_data(task: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(11)
    x = 2 * torch.rand(N, 2, generator=g, dtype=torch.float64) - 1
    noise = torch.randn(N, 3, generator=g, dtype=torch.float64)
    if task == "regression":  # far from standardised, so that units matter
        return x, 5 + 10 * (torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1]) + noise[:, 0]
    score = torch.stack([x[:, 0], x[:, 1], -x.sum(1)], 1)
    return x, (score + 0.3 * noise).argmax(1)


CASES = [Case(row, task) for row in doxa.methods() for task in row.tasks]
FIXTURES = {
    "case": CASES,
    "trained": [c for c in CASES if c.trains],
    "regression": [c for c in CASES if c.regression],
    "classification": [c for c in CASES if not c.regression],
    "trained_regression": [c for c in CASES if c.trains and c.regression],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    by_family = metafunc.definition.get_closest_marker("by_family") is not None
    for name, cases in FIXTURES.items():
        if name in metafunc.fixturenames:
            quick = few(cases, by_family)
            cpu = [pytest.param(c, marks=() if c in quick else pytest.mark.slow) for c in cases]
            metafunc.parametrize(name, [*cpu, *on_gpu(cases)], ids=str, indirect=True)


def few(cases: list[Case], by_family: bool) -> frozenset[Case]:
    """Those that are quick."""
    chosen = first_of_each()
    first = {case.name: case for case in reversed(cases)}.values()
    if by_family:
        return frozenset(case for case in first if case.name in chosen)
    return frozenset(first) | {case for case in cases if case.name in chosen}


def on_gpu(cases: list[Case]) -> list[Any]:
    """All of them there; where there is none, one that is skipped and says so."""
    there = cases if torch.cuda.is_available() else cases[:1]
    return [pytest.param(replace(c, device="cuda"), marks=pytest.mark.gpu) for c in there]


def importable(case: Case) -> str:
    """Why the method cannot be had here, or nothing. A module that is there must import."""
    module = case.row.target.partition(":")[0]
    if importlib.util.find_spec(module) is None:
        return f"{module} does not exist"
    try:
        doxa.get_method(case.name)
    except doxa.errors.MissingExtra as error:
        return str(error)
    return ""


def _chosen(request: pytest.FixtureRequest) -> Case:
    case: Case = request.param
    if case.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if reason := importable(case):
        pytest.skip(reason)
    return case


for _name in FIXTURES:
    globals()[_name] = pytest.fixture(name=_name)(_chosen)


@pytest.fixture
def available() -> list[Case]:
    """All cases that can run here, for the few checks that take them together."""
    return [chosen for chosen in CASES if not importable(chosen)]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def global_state() -> Callable[[], list[Any]]:
    """Everything global that a library could disturb."""

    def look() -> list[Any]:
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002
        state = [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), *rest]
        state += [torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()]
        if torch.cuda.is_available():
            state.append(torch.cuda.get_rng_state().tolist())
        return state

    return look


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """Largest difference over the largest value (what is below a millionth is rounding), of two
    dicts of tensors."""

    def check(got: dict[str, Tensor], want: dict[str, Tensor], relative: float) -> None:
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name].shape == value.shape, name
            if value.numel() == 0:
                continue
            scale = max(float(value.double().abs().max()), 1e-6)
            worst = float((got[name].double() - value.double()).abs().max()) / scale
            assert worst <= relative, f"{name}: {worst:.3g} > {relative:.3g}"

    return check


@pytest.fixture
def answers() -> Callable[..., dict[str, Tensor]]:
    """What a predictive says, as a dict; samples where it has them."""

    def of(p: doxa.Predictive, y: Tensor | None = None) -> dict[str, Tensor]:
        names = ["mean", "aleatoric", "epistemic", "samples"]
        if p.likelihood.classifies:
            names += ["probs", "entropy", "mutual_information", "variation_ratio"]
        found = {name: getattr(p, name) for name in names if hasattr(p, name)}
        return found if y is None else found | {"log_prob": p.log_prob(y)}

    return of
