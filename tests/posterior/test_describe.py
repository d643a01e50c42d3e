"""What a prompt and a notebook show of what comes back: true, short, and harmless to a page."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from mistakes import FRAME, LABELS, X, Y, chains, classes, exact, fit, named, net, numbers, process

import doxa
from doxa import evaluate


def mixed() -> Any:
    return doxa.MixturePosterior([numbers(), process()], [1.0, 3.0])


POSTERIORS: dict[str, tuple[Any, str, list[str]]] = {
    "points": (numbers, "SamplePosterior by map: ok", ["2 members of 1 point", "3 columns"]),
    "chains": (
        chains, "SamplePosterior by hmc (draws=4, burn_in=2, leapfrog=2): not-converged (R-hat",
        ["2 members of 4 draws", "fitted to  20 rows"],
    ),
    "names": (named, "SamplePosterior by map: ", ["3 columns: age, height, weight"]),
    "classes": (classes, "SamplePosterior by map: ok", ["classification, categorical"]),
    "process": (process, "GPPosterior by gp (noise=0.1, refine=0): ok", ["log_evidence −"]),
    "exact": (exact, "LinearPosterior by linear: degenerate (the features", ["regression"]),
    "mixture": (mixed, "MixturePosterior of map, gp", ["2 parts, weights 0.25, 0.75"]),
    "conformal": (
        lambda: evaluate.conformal(numbers(), (X + 1, Y)),
        "TransformedPosterior by map through Inter",
        ["2 members of 1 point"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_posterior_in_words(name: str) -> None:
    make, start, words = POSTERIORS[name]
    shown = repr(make())
    assert shown.startswith(f"<{start}") and shown.endswith(">")
    assert all(word in shown for word in words), shown
    assert "object at 0x" not in shown and shown == repr(make())


PREDICTIVES: dict[str, Any] = {
    "components": lambda: numbers().predict(X),
    "moments": lambda: numbers().predict(X, keep="moments"),
    "closed": lambda: process().predict(X),
    "classes": lambda: classes().predict(X),
    "moments of classes": lambda: classes().predict(X, keep="moments"),
    "yes or no": lambda: fit(data=(X, (Y > 0).long()), likelihood="bernoulli").predict(X),
    "counts": lambda: fit(data=(X, LABELS), likelihood="poisson").predict(X),
    "corrected": lambda: evaluate.recalibrate(numbers(), (X + 1, Y), "quantile").predict(X),
    "conformal": lambda: evaluate.conformal(numbers(), (X + 1, Y)).predict(X),
    "blended": lambda: mixed().predict(X),
}


@pytest.mark.parametrize("name", PREDICTIVES)
def test_a_predictive_has_what_it_says(name: str) -> None:
    p = PREDICTIVES[name]()
    shown = repr(p)
    assert f"at 20 rows: {p.likelihood.name}" in shown
    found = re.search(r"has +(.*)>$", shown)
    assert found is not None
    own = LABELS if p.likelihood.name in ("categorical", "poisson") else (Y > 0).long()
    for quantity in found[1].split(", "):
        value = getattr(p, quantity)
        if callable(value):
            assert value(*[own] * (quantity == "log_prob")) is not None


def test_the_range_of_a_prediction_is_in_its_words() -> None:
    p = doxa.Predictive(
        torch.tensor([[[-1.0], [1500.0]]]), "gaussian", {"log_noise": torch.zeros(())}
    )
    assert "mean     −1 … 1,500" in repr(p) and "std      1\n" in repr(p)


def test_several_heads_are_a_line_each() -> None:
    two = doxa.Predictive(
        (torch.zeros(2, 4, 1), torch.zeros(2, 4, 3)), ("gaussian", "categorical"),
        {"0.log_noise": torch.zeros(())},
    )  # fmt: skip
    assert "Predictive of 2 heads" in repr(two)
    assert re.search(r"head 1 +Predictive at 4 rows: categorical, 3 classes", repr(two))


def test_a_sweep_and_draws_in_words() -> None:
    grid = doxa.Runs(rows=[range(10), range(20)], grid={"lr": [0.1, 0.2]})
    shown = repr(fit(runs=grid))
    assert shown.startswith("<Sweep of 4 runs by map: 4 ok")
    assert re.search(r"splits +2\n.*lr +0\.1, 0\.2\n", shown)
    method = doxa.HMC(draws=4, burn_in=2, leapfrog=2)
    draws = doxa.sample(lambda p: -p["a"].square().sum(), {"a": torch.zeros(2)}, method, 2)
    assert repr(draws).startswith("<Draws by hmc (draws=4, burn_in=2, leapfrog=2): not-converged")
    assert "2 chains of 4 draws" in repr(draws) and "a[2]" in repr(draws)


def test_a_notebook_gets_a_table_in_which_names_are_text() -> None:
    hostile = FRAME.set_axis(["<b>age</b>", "a&b", "weight"], axis=1)
    shown = fit(data=(hostile, Y))._repr_html_()
    assert "&lt;b&gt;age&lt;/b&gt;, a&amp;b, weight" in shown and len(shown) < 4000
    for thing in (classes().predict(X), fit(net(), runs=doxa.Runs(seeds=[0, 1]))):
        assert thing._repr_html_().startswith("<table") and "script" not in thing._repr_html_()
