"""Every registered method × every task it has, as fixtures that a test asks for by name.

`case` is all of them, `trained` those that train a network, `regression` and `classification` one
task; each runs on the CPU and, marked `gpu`, on a GPU. A method joins by being registered. What it
needs to be quick is in `FAST`; what makes a run hopeless, a single step, or a grid of its own is
there too, and has a default.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from short import SETTINGS
from torch import Tensor

import doxa
from doxa.registry import Row

N = 40
STEPS = 60


@dataclass(frozen=True)
class Fast:
    """Settings for a small machine; `settings` go to the method, `options` to `fit`."""

    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    one_step: dict[str, Any] = field(default_factory=dict)
    many_steps: dict[str, Any] = field(default_factory=dict)  # where engines are compared
    hopeless: dict[str, Any] = field(default_factory=dict)
    hopeless_options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e6})
    changed: dict[str, Any] = field(default_factory=dict)  # settings that are not the defaults
    rounding: float = 1e-8  # of float64, grown by a fit: a burn-in that adapts is chaotic
    grid: dict[str, list[Any]] = field(default_factory=lambda: {"lr": [3e-3, 1e-2]})


FAST = {
    "hmc": Fast(
        SETTINGS["hmc"],
        one_step={"draws": 1, "burn_in": 0, "leapfrog": 2},
        many_steps={"draws": 20, "burn_in": 0, "leapfrog": 2},
        hopeless={"draws": 4, "burn_in": 0, "leapfrog": 1},
        hopeless_options={},
        changed={"draws": 7, "target_accept": 0.7},
        rounding=1e-6,
        grid={"temperature": [0.5, 1.0]},
    ),
    "nuts": Fast(
        SETTINGS["nuts"],
        one_step={"draws": 1, "burn_in": 0, "max_depth": 2},
        many_steps={"draws": 20, "burn_in": 0, "max_depth": 2},
        hopeless={"draws": 4, "burn_in": 0, "max_depth": 1},
        hopeless_options={},
        changed={"draws": 7, "target_accept": 0.7, "mass": "dense"},
        rounding=1e-4,
        grid={"temperature": [0.5, 1.0]},
    ),
    "metropolis": Fast(
        SETTINGS["metropolis"],
        one_step={"draws": 1, "burn_in": 0, "scale": 0.05},
        many_steps={"draws": 20, "burn_in": 0, "scale": 0.05},
        hopeless={"draws": 4, "burn_in": 0, "scale": 100.0},
        hopeless_options={},
        changed={"draws": 7, "scale": 0.7, "covariance": "diagonal"},
        grid={"temperature": [0.5, 1.0]},
    ),
    "sgld": Fast(
        SETTINGS["sgld"],
        one_step={"draws": 1, "burn_in": 0},
        many_steps={"draws": 20, "burn_in": 20},
        hopeless={"step": 1e6},
        hopeless_options={},
        changed={"draws": 7, "decay": 0.0, "step": 0.01},
        grid={"temperature": [0.5, 1.0]},
    ),
    "psgld": Fast(
        SETTINGS["psgld"],
        one_step={"draws": 1, "burn_in": 0, "correction": "none"},
        many_steps={"draws": 20, "burn_in": 20},
        hopeless={"step": 1e6},
        hopeless_options={},
        changed={"draws": 7, "correction": "gamma", "smoothing": 0.9},
        grid={"temperature": [0.5, 1.0]},
    ),
    "sghmc": Fast(
        SETTINGS["sghmc"],
        one_step={"draws": 1, "burn_in": 0},
        many_steps={"draws": 20, "burn_in": 20},
        hopeless={"step": 1e6},
        hopeless_options={},
        changed={"draws": 7, "friction": 0.2, "gradient_noise": 0.01},
        grid={"step": [1e-4, 2e-4]},
    ),
    "constant-sgd": Fast(
        SETTINGS["constant-sgd"],
        one_step={"draws": 1, "burn_in": 0, "probes": 2},
        many_steps={"draws": 20, "burn_in": 10, "rate": 0.01},
        hopeless={"rate": 1e6},
        hopeless_options={},
        changed={"draws": 7, "rate": 0.1},
        grid={"rate": [0.01, 0.03]},
    ),
    "cyclical": Fast(
        SETTINGS["cyclical"],
        one_step={"cycles": 1, "draws": 1, "exploration": 0.0},
        many_steps={"cycles": 2, "draws": 10},
        hopeless={"step": 1e6},
        hopeless_options={},
        changed={"inner": "sghmc", "cycles": 3, "friction": 0.2},
        grid={"temperature": [0.5, 1.0]},
    ),
    "minibatch-mh": Fast(
        SETTINGS["minibatch-mh"],
        one_step={"draws": 1, "burn_in": 0, "step": 1e-4},
        many_steps={"draws": 20, "burn_in": 0, "step": 1e-4},
        hopeless={"draws": 8, "burn_in": 0, "step": 1e6},
        hopeless_options={},
        changed={"draws": 7, "proposal": "walk", "target_accept": 0.3},
        grid={"temperature": [0.5, 1.0]},
    ),
    "mean-field": Fast(
        changed={"initial_std": 0.02, "elbo_samples": 3}, grid={"initial_std": [0.02, 0.1]}
    ),
    "mc-dropout": Fast(changed={"p": 0.2, "insert": "all"}, grid={"p": [0.05, 0.3]}),
    "laplace": Fast(
        changed={"structure": "diagonal", "temperature": 0.5}, grid={"temperature": [0.5, 1.0]}
    ),
    "linear": Fast(grid={}),
    "gp": Fast(grid={}),
}


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
        return FAST.get(self.name, Fast())

    @property
    def cls(self) -> Any:
        return doxa.get_method(self.name)

    @property
    def trains(self) -> bool:
        """The others bring their own functions, found without drawing anything."""
        return self.row.family not in ("exact", "process")

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
            **self.fast.options,
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
    for name, cases in FIXTURES.items():
        if name in metafunc.fixturenames:
            gpu = [pytest.param(replace(c, device="cuda"), marks=pytest.mark.gpu) for c in cases]
            metafunc.parametrize(name, [*cases, *gpu], ids=str, indirect=True)


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
    """Largest difference over the largest value, of two dicts of tensors."""

    def check(got: dict[str, Tensor], want: dict[str, Tensor], relative: float) -> None:
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name].shape == value.shape, name
            if value.numel() == 0:
                continue
            scale = float(value.double().abs().max()) or 1.0
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
