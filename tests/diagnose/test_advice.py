"""The advice of the diagnostics runs as it is printed, and is for the task at hand."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from short import LENGTHS, short

import doxa
from doxa.diagnose import Diagnosis, Finding, advice, convergence, doctor, inputs, spread
from doxa.diagnose.data import DiagnosticData
from doxa.errors import DoxaDeprecationWarning
from doxa.posterior import Status

TASKS = {
    "regression": ("gaussian", 1),
    "classification": ("categorical", 3),
    "counts": ("poisson", 1),
}
STATUSES = ("diverged", "stopped", "not-converged", "overconfident", "underconfident",
            "worse-than-constant", "worse-than-map", "degenerate", "prior-collapse",
            "underfit")  # fmt: skip


def rows(task: str, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=g)
    if task == "classification":
        return x, torch.randint(0, 3, (n,), generator=g)
    if task == "counts":
        return x, torch.poisson(x[:, 0].exp(), generator=g)
    return x, x.sum(1) + torch.randn(n, generator=g)


class Quick(ModuleType):
    """doxa itself, but that its fits are short."""

    def __init__(self) -> None:
        super().__init__("doxa")
        self.asked: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(doxa, name)

    def fit(self, net: Any, data: Any, method: Any, **options: Any) -> Any:
        self.asked.append({"method": method, **options})
        options["steps"] = min(3, options.get("steps", 3))
        if isinstance(method, str):
            return doxa.fit(net, data, short(method), progress=False, **options)
        lengths = {n: v for n, v in LENGTHS.items() if hasattr(method, n)}
        shortened = type(method)(**(method.settings() | lengths))
        return doxa.fit(net, data, shortened, progress=False, **options)


def run(snippet: str, posterior: Any, task: str) -> Quick:
    quick = Quick()
    width = TASKS[task][1]
    names = {"doxa": quick, "posterior": posterior, "net": doxa.nets.mlp(2, width, (4,)),
             "data": rows(task, 30), "held_out": rows(task, 30, 1)}  # fmt: skip
    exec(snippet, names)
    return quick


def fitted(task: str, method: str = "map", **options: Any) -> Any:
    likelihood, outputs = TASKS[task]
    net = doxa.nets.mlp(2, outputs, (4,)) if short(method).needs_network else None
    chosen = {
        "steps": 3,
        "progress": False,
        "likelihood": likelihood,
        "validation": None,
        **options,
    }
    return doxa.fit(net, rows(task, 30), short(method), **chosen)


def everything(case: DiagnosticData) -> dict[str, advice.Advice]:
    """All advice that there is for a case, by its function."""
    found = {"MORE_ROWS": advice.MORE_ROWS, "NEW_ROWS": advice.NEW_ROWS}
    found["recalibrate"] = advice.recalibrate(case.posterior)
    for name, function in inspect.getmembers(advice, inspect.isfunction):
        parameters = list(inspect.signature(function).parameters)
        if parameters == ["case"] and not name.startswith("_"):
            found[name] = function(case)
    for name in ("laplace", "deep-ensemble", "gp", "linear", "hmc", "map"):
        found[f"another {name}"] = advice.another(case, name)
    found["last layer"] = convergence._last_layer(case)
    found["scales"] = inputs._left_to_fit(case, "scale them alike")
    found["point"] = advice.Advice("", spread._point(case).code)
    if not case.posterior.base_likelihood.classifies:
        for name in ("gaussian", "student-t"):
            found[name] = advice.other_likelihood(case, name, "other noise")
    else:
        del found["noise_by_input"]  # classes have none
    return {name: each for name, each in found.items() if each is not None}


SLOW = [
    pytest.param(task, method, marks=pytest.mark.slow)
    for method in ("deep-ensemble", "laplace", "hmc", "mean-field", "svgd", "linear")
    for task in TASKS
    if doxa.methods()[method].family != "exact" or task == "regression"
    if (task, method) != ("counts", "laplace")
]


@pytest.mark.parametrize(
    ("task", "method"), [("regression", "map"), ("classification", "map"), *SLOW]
)
def test_every_snippet_runs_as_printed(task: str, method: str) -> None:
    posterior = fitted(task, method)
    case = DiagnosticData(posterior, rows(task, 30), None, 0.9, 0)
    for name, each in everything(case).items():
        assert each.words or name == "point", name
    done = snippets(case)
    if method == "map":  # slow to import; the others run it
        done = {snippet for snippet in done if '"gp"' not in snippet}
    for snippet in done:
        assert max(map(len, snippet.splitlines())) <= advice.WIDTH, snippet
        run(snippet, posterior, task)
    assert len(done) >= 5


def snippets(case: DiagnosticData) -> set[str]:
    return {snippet for each in everything(case).values() for snippet in each.code}


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_the_checks_print_these_and_nothing_else(task: str) -> None:
    """Of a fit that learned 25 rows by heart, under every status: a snippet stands in the printed
    table line by line, and is one of those that were run, or runs."""
    g = torch.Generator().manual_seed(3)
    x, y = rows(task, 25)
    data = x, y if task == "classification" else torch.randn(25, generator=g)
    posterior = doxa.fit(doxa.nets.mlp(2, TASKS[task][1], (30,)), data, "map", steps=150,
                         likelihood=TASKS[task][0], prior=doxa.Normal(10.0), validation=None,
                         progress=False)  # fmt: skip
    found = doctor(posterior, data, rows(task, 80, 1))
    printed = str(found).split("\n\n")
    assert len(found.code) >= 3
    assert printed[2:] == found.code
    for finding in found.alarms:
        assert set(finding.code) <= set(found.code)
    words = " ".join(finding.advice for finding in found)
    for each in ("stop early", "standardise", "more rows"):
        assert each in words
    case = DiagnosticData(posterior, data, None, 0.9, 0)
    said = list(found.alarms)
    for status in STATUSES:
        posterior.record.status = Status(status, "it was said")
        said.append(convergence.status(case))
        assert said[-1].alarms
        assert "it was said" in said[-1].words
    for snippet in {s for finding in said for s in finding.code} - snippets(case):
        run(snippet, posterior, task)


def test_recalibration_is_of_the_kind_that_the_task_has() -> None:
    for task, kind in (("regression", "quantile"), ("classification", "temperature")):
        told = advice.recalibrate(fitted(task))
        assert told is not None
        assert f'"{kind}"' in told.code[0]
        assert "ensemble" not in told.code[0]


def test_a_snippet_keeps_what_the_fit_was_given() -> None:
    posterior = fitted("regression", likelihood=doxa.Gaussian(0.5), prior=doxa.Normal(2.0),
                       standardize=True)  # fmt: skip
    case = DiagnosticData(posterior, rows("regression", 30), None, 0.9, 0)
    asked = run(advice.refit(case, steps=2), posterior, "regression").asked[0]
    assert asked["likelihood"] == doxa.Gaussian(0.5)
    assert asked["prior"] == doxa.Normal(2.0)
    assert asked["standardize"] is True
    own = fitted("regression", "deep-ensemble")
    case = DiagnosticData(own, rows("regression", 30), None, 0.9, 0)
    assert "members=10" in (advice.ensemble(case) or advice.MORE_ROWS).code[0]
    assert 'likelihood="gaussian"' in advice.refit(case)


def test_what_is_done_already_is_not_advised() -> None:
    task = "regression"
    scaled = doxa.fit(doxa.nets.mlp(2, 1, (4,)), rows(task, 80), "map", steps=3, standardize=True,
                      validation=0.2, progress=False)  # fmt: skip
    case = DiagnosticData(scaled, rows(task, 80), None, 0.9, 0)
    assert advice.standardise(case) is None
    assert advice.early_stopping(case) is None
    assert advice.calmer(case).words == "a tenth of the learning rate"
    assert "lr=0.001" in advice.calmer(case).code[0]


def test_one_verdict_the_worst_first() -> None:
    found = [Finding("a", "good", 1.0, "fine"), Finding("b", "slight", 1.0, "little"),
             Finding("c", "warning", 1.0, "care"), Finding("d", "bad", 1.0, "no"),
             Finding("e", "bad", 1.0, "no"), Finding("f", "not checked", None, "why")]  # fmt: skip
    for several, verdict, words in (
        (found, "bad", "Do not rely on it: 2 bad findings, 1 warning and 1 slight finding "
                       "(d, e, c, b)."),
        (found[:3], "warning", "Use it with care: 1 warning and 1 slight finding (c, b)."),
        (found[:2], "slight", "No alarm: 1 slight finding (b)."),
        (found[:1], "good", "No fault was found in 1 check."),
        (found[5:], "not checked", "Nothing could be checked."),
    ):  # fmt: skip
        diagnosis = Diagnosis(several)
        assert diagnosis.status == verdict
        assert diagnosis.summary == words
        assert words in " ".join(str(diagnosis).split())
    assert Diagnosis(found[:2]).ok
    assert "held-out rows" in Diagnosis(found[:1], new_rows=False).summary


def test_old_names_still_work() -> None:
    """`doctor` is `diagnose`; `verdict` is `status`, with a warning."""
    assert doctor is doxa.diagnose.diagnose
    found = Diagnosis([Finding("a", "good", 1.0, "fine"), Finding("b", "bad", 1.0, "no")])
    with pytest.warns(DoxaDeprecationWarning, match=r"use Diagnosis\.status"):
        assert found.verdict == found.status == "bad"
    with pytest.warns(DoxaDeprecationWarning, match=r"use Finding\.status"):
        assert found["b"].verdict == found["b"].status == "bad"


def test_snippets_for_a_neural_process_are_for_tasks() -> None:
    """Its likelihood is its own, and nothing that learns from rows takes its data."""
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.rand(8, 1, generator=g), torch.randn(8, 1, generator=g)) for _ in range(20)]
    tasks = doxa.data.Tasks(pairs)
    posterior = doxa.fit(None, tasks, short("cnp"), steps=3, progress=False)
    seen = posterior.condition(*pairs[0])
    done = snippets(DiagnosticData(seen, pairs[0], None, 0.9, 0))
    again = [snippet for snippet in done if "doxa.fit" in snippet and "posterior.sc" not in snippet]
    assert again
    for snippet in again:
        exec(snippet, {"doxa": Quick(), "posterior": seen, "net": None, "data": tasks})
