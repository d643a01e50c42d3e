"""Every registered method × every task it has, as fixtures that a test asks for by name.

`case` is all of them, `trained` those that train a network, `regression` and `classification` one
task; each runs on the CPU and, marked `gpu`, on a GPU. A method joins by its row in the registry,
which also says what makes it quick; `fast` derives the rest from its fields.

What is quick for every method, on its first task, is what its own file can get wrong: what it
predicts and in which units, noise of each member, chunks of members, subsets, row weights,
BatchNorm's statistics, saving, and one interruption; the first method of each family and kind of
answer has all its tasks. A test marked `by_family` checks what methods share (the driver, the
engines, runs and grids, checkpoints at other moments), or takes long: there these first methods
are quick and the others `slow`.

The whole matrix (every method × every task × every engine) is too long for every change. Under each
contract test a method that is not quick keeps one of its variants in the slow suite, its
representative; the variants that remain are marked `matrix`, and `make test-matrix` runs them.
`test_representatives.py` checks that no method loses its representative.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import zlib
from collections import defaultdict
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
from doxa.data import Tasks
from doxa.errors import ModelError
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
        return self.method_and_task + ("" if self.device == "cpu" else f"-{self.device}")

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def method_and_task(self) -> str:
        """The same on every device."""
        return f"{self.row.name}-{self.task}"

    @property
    def regression(self) -> bool:
        return self.task != "classification"

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
            "validation": None,  # the contract of held-out rows is in test_validation.py
            **options,
        }
        other = "net" in chosen
        network = chosen.pop("net") if other else self.net()
        method = self.method(**(settings or {}))
        data = self.data() if data is None else data
        if self.cls.own_weights and chosen.get("init") == "given":
            chosen["init"] = "fresh"  # which is one start per seed and member, too
        if self.task != "tasks":
            try:
                return doxa.fit(network, data, method, **chosen)
            except ModelError as error:
                if other and self.cls.own_weights:
                    pytest.skip(f"its layers cannot be put into this network: {error}")
                raise
        fitted = doxa.fit(network, as_tasks(*data), method, **chosen)
        x, y = self.data()
        return conditioned(fitted, x, y.reshape(len(y), *data[1].shape[1:]))

    def posterior(self, dtype: torch.dtype = torch.float32) -> Any:
        """A fit that tests share: do not change it."""
        return shared_posterior(self, dtype)


def as_tasks(x: Any, y: Any) -> Any:
    """A task for each row: five points around it, all with its y."""
    around = torch.linspace(-0.2, 0.2, 5, dtype=torch.float64)[:, None]
    return Tasks((own + around, level.expand(5)) for own, level in zip(x, y, strict=True))


def conditioned(fitted: Any, x: Tensor, y: Tensor) -> Any:
    """What was fitted to tasks, given the first rows as a context: it predicts rows."""
    if isinstance(fitted, doxa.Sweep):
        return doxa.Sweep([conditioned(one, x, y) for one in fitted], fitted.specs)
    return fitted.condition(x[:10], y[:10])


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
    if task != "classification":  # far from standardised, so that units matter
        return x, 5 + 10 * (torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1]) + noise[:, 0]
    score = torch.stack([x[:, 0], x[:, 1], -x.sum(1)], 1)
    return x, (score + 0.3 * noise).argmax(1)


# Tests that ask what has no meaning for a method that learns from tasks, and why.
NOT_FOR_TASKS = {
    "test_a_given_noise_is_in_units_of_y": "its networks predict the noise",
    "test_a_good_run_is_ok_and_learns": "its tasks are too few here; tests/neural has it",
    "test_units_of_y": "its context is fixed here; tests/neural has it",
    "test_whole_weights_are_repeated_rows": "a task's context is drawn by its place in a batch",
    "test_rows_of_weight_zero_are_no_rows": "a task's context is drawn by its place in a batch",
    "test_selection_is_by_the_held_out_rows": "tasks are not judged by what is held out",
    "test_a_share_is_held_out_of_every_split": "tasks are not judged by what is held out",
    "test_with_splits_the_best_of_each_is_selected": "tasks are not judged by what is held out",
}
# The same where it has one function a member, as methods of points do.
NOT_FOR_POINTS = (
    "test_repeated_calls_agree_and_seeds_differ", "test_n_is_the_number_of_samples_in_all",
    "test_functions_are_the_samples_of_predict",
)  # fmt: skip


# Tests that compare weights or buffers with those of the given network, by name or by value.
NOT_FOR_OWN_WEIGHTS = {
    "test_the_fit_starts_where_the_network_is",
    "test_members_that_start_together_part",
    "test_each_member_has_statistics_of_its_own",
    "test_a_member_is_the_same_alone_and_with_others",
    "test_all_draws_of_a_member_have_one_trunk",
    "test_weights_outside_the_subset_do_not_spread",
    "test_a_narrow_prior_makes_every_layer_smaller",
    "test_a_narrow_prior_makes_points_smaller_too",
    "test_the_trunk_is_trained",
}


def asked_of(test: str, case: Case) -> bool:
    """Whether a test has a meaning for a case."""
    if test in NOT_FOR_OWN_WEIGHTS and not importable(case) and case.cls.own_weights:
        return False
    if case.task != "tasks":
        return True
    points = test in NOT_FOR_POINTS and not case.cls.latent
    return test not in NOT_FOR_TASKS and not points


CASES = [Case(row, task) for row in doxa.methods() for task in row.tasks]
FIXTURES = {
    "case": CASES,
    "trained": [c for c in CASES if c.trains],
    "regression": [c for c in CASES if c.regression],
    "classification": [c for c in CASES if not c.regression],
    "trained_regression": [c for c in CASES if c.trains and c.regression],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test, by_family = metafunc.definition.name, is_by_family(metafunc.definition)
    for name in FIXTURES:
        if name in metafunc.fixturenames:
            cases = cases_of(name, test)
            quick = quick_cases(name, test, by_family)
            cpu = [pytest.param(c, marks=() if c in quick else pytest.mark.slow) for c in cases]
            metafunc.parametrize(name, [*cpu, *on_gpu(cases)], ids=str, indirect=True)


def is_by_family(node: pytest.Item) -> bool:
    return node.get_closest_marker("by_family") is not None


def cases_of(fixture: str, test: str) -> list[Case]:
    """The cases of a fixture that a test has a meaning for."""
    return [case for case in FIXTURES[fixture] if asked_of(test, case)]


@cache
def quick_cases(fixture: str, test: str, by_family: bool) -> frozenset[Case]:
    """Those that are quick, unless the whole test is slow."""
    cases, chosen = cases_of(fixture, test), first_of_each()
    first = {case.name: case for case in reversed(cases)}.values()
    if by_family:
        return frozenset(case for case in first if case.name in chosen)
    return frozenset(first) | {case for case in cases if case.name in chosen}


def on_gpu(cases: list[Case]) -> list[Any]:
    """All of them there; where there is none, one that is skipped and says so."""
    there = cases if torch.cuda.is_available() else cases[:1]
    return [pytest.param(replace(c, device="cuda"), marks=pytest.mark.gpu) for c in there]


# Cases that a test skips where it runs another task of the same method: they represent nobody.
SKIPPED = {("test_rows_of_weight_zero_are_no_rows", "nngp-classification")}


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `matrix` the variants that neither the quick nor the slow suite needs."""
    groups: defaultdict[Any, list[Variant]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and (variant := variant_of(item)) is not None:
            key = (item.path, item.originalname, variant.case.name, variant.case.device)
            groups[key].append(variant)
    for variants in groups.values():
        kept = [one for one in variants if one.stands_for_others] or [representative(variants)]
        for variant in variants:
            if variant not in kept:
                variant.item.add_marker(pytest.mark.matrix)


@dataclass(frozen=True)
class Variant:
    """One collected test of one method: a task, and an engine or whatever else is varied."""

    item: pytest.Function
    fixture: str
    case: Case

    @property
    def stands_for_others(self) -> bool:
        """Whether its case is quick, or would be if the whole test were not slow. Such a case
        keeps all its variants, since other methods keep only one."""
        quick = quick_cases(self.fixture, self.item.originalname, is_by_family(self.item))
        return replace(self.case, device="cpu") in quick

    @property
    def skipped(self) -> bool:
        return (self.item.originalname, str(self.case)) in SKIPPED


def variant_of(item: pytest.Function) -> Variant | None:
    """None for a test that is not parametrised with a case."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    cases = {name: value for name, value in params.items() if isinstance(value, Case)}
    return next((Variant(item, name, case) for name, case in cases.items()), None)


def representative(variants: list[Variant]) -> Variant:
    """The variant of a method that the slow suite keeps.

    A checksum of the test's name and parameters chooses it. So tasks and engines vary between
    the methods, and adding a method does not change the representative of another one.
    """
    able = [variant for variant in variants if not variant.skipped]
    return min(able or variants, key=lambda variant: zlib.crc32(variant.item.name.encode()))


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
