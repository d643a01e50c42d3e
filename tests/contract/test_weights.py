"""A row of weight 2 is two rows, and one of weight 0 is none: n is the sum of weights.

Exact where every step sees all rows and its noise does not depend on them: noise is keyed by the
member and the step, so this holds for chains and for variational methods, too. (Rows that are drawn
with replacement are all rows, each once, where a batch holds them all.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from doxa.errors import DataError

Check = Callable[..., None]

BY_ROW = {
    "mc-dropout": "has a mask a row, so that other rows are other masks",
    "concrete-dropout": "has a mask a row, so that other rows are other masks",
    "mnf": "has noise a row, so that other rows are other noise",
    "bootstrap": "has a random weight a row",
    "rank1": "deals rows out to its components, with noise of their own",
    "batch-ensemble": "deals rows out to its components",
    "sparse-gp-classification": "has noise a row where a target has several latents",
    "nngp-classification": "is calibrated on rows left out one by one, not with their copies",
    "ntk": "is calibrated on rows left out one by one, not with their copies",
    "deep-gp": "has noise a row, so that other rows are other noise",
}


def comparable(case: Any, data: Any, **options: Any) -> Any:
    """A fit whose every step sees all rows, from the same start, in the units it is given."""
    why = BY_ROW.get(case.name) or BY_ROW.get(case.method_and_task)
    if why is not None:
        pytest.skip(why)
    size = len(data[1])
    settings = case.fast.many_steps if case.row.family == "mcmc" else {}
    chosen = {
        "batch_size": size, "steps": 20, "standardize": False, "dtype": torch.float64,
        "init": "given", "members": 2, "settings": settings, "validation": None,
    }  # fmt: skip
    return case.fit(data, **{**chosen, **options})


def scaled(case: Any) -> tuple[Tensor, Tensor]:
    """Targets near 1, since they are not standardised here."""
    x, y = case.data()
    return (x, (y - 5) / 10) if case.regression else (x, y)


def agree(got: Any, want: Any, case: Any, answers: Any, assert_close: Check) -> None:
    x, y = scaled(case)
    relative = max(1e-8, case.fast.rounding)
    assert_close(answers(got.predict(x), y), answers(want.predict(x), y), relative)
    assert got.log_evidence is None, "a weighted likelihood is tempered, and has no evidence"
    assert got.elbo is None, "nor a bound on it"


def test_whole_weights_are_repeated_rows(case: Any, answers: Any, assert_close: Check) -> None:
    x, y = scaled(case)
    weight = torch.arange(len(y)) % 3 + 1
    again = torch.repeat_interleave(torch.arange(len(y)), weight)
    got = comparable(case, (x, y), sample_weight=weight)
    want = comparable(case, (x[again], y[again]))
    agree(got, want, case, answers, assert_close)
    plain = comparable(case, (x, y))
    assert not torch.allclose(plain.predict(x).variance, want.predict(x).variance, rtol=1e-6)


@pytest.mark.by_family
def test_rows_of_weight_zero_are_no_rows(case: Any, answers: Any, assert_close: Check) -> None:
    """However far away they lie."""
    x, y = scaled(case)
    kept = torch.arange(len(y)) % 4 != 1
    far = torch.where(kept[:, None], x, 50.0)
    got = comparable(case, (far, y), sample_weight=kept.double())
    agree(got, comparable(case, (x[kept], y[kept])), case, answers, assert_close)


def with_rows_between(case: Any, y_there: float, weight_there: float) -> tuple[Any, Tensor, Tensor]:
    """The case's data under uneven weights, with rows in between whose y is given, and whose x is
    NaN where they weigh nothing (tasks are checked when they are made); and which rows are its
    own."""
    x, y = case.data()
    kept = torch.arange(4 * len(y) // 3) % 4 != 1
    g = torch.Generator().manual_seed(3)
    weight = torch.full((len(kept),), weight_there, dtype=torch.float64)
    weight[kept] = 0.5 + torch.rand(int(kept.sum()), generator=g, dtype=torch.float64)
    wide = x[:1].repeat(len(kept), 1)
    if weight_there == 0 and case.task != "tasks":
        wide[:] = torch.nan
    long = y.new_full((len(kept),), y_there)
    wide[kept], long[kept] = x[: int(kept.sum())], y[: int(kept.sum())]
    return (wide, long), weight, kept


def told(posterior: Any, case: Any, answers: Any) -> tuple[dict[str, Tensor], Any, str]:
    """What a posterior says of rows, and what the held-out rows say of it."""
    held = posterior.diagnostics.get("held_out", {})
    return answers(posterior.predict(case.data()[0])), held, str(posterior.status)


@pytest.mark.by_family
def test_rows_of_weight_zero_are_never_looked_at(case: Any, answers: Any) -> None:
    """With x at NaN and y at 1000: the fit is that without them, to the bit; also what is held
    out, and what that says."""
    data, weight, kept = with_rows_between(case, 1000, 0.0)
    options: Any = {"validation": 0.25, "members": 2}
    got = told(case.fit(data, sample_weight=weight, **options), case, answers)
    alone = tuple(part[kept] for part in data)
    want = told(case.fit(alone, sample_weight=weight[kept], **options), case, answers)
    assert got[0].keys() == want[0].keys()
    for name, value in want[0].items():
        assert torch.equal(got[0][name], value), name
    assert got[1:] == want[1:]


def test_rows_of_next_to_no_weight_decide_nothing(
    case: Any, answers: Any, assert_close: Check
) -> None:
    """Whether their y is far away or not, and whether they are trained on or held out."""
    y = (0, 1000) if case.regression else (0, 2)
    found = []
    for there in y:
        data, weight, _ = with_rows_between(case, there, 1e-14)
        options: Any = {"validation": 0.25, "members": 2, "dtype": torch.float64}
        found.append(told(case.fit(data, sample_weight=weight, **options), case, answers))
    (near, held, status), (far, far_held, far_status) = found
    assert_close(far, near, 1e-4)
    assert far_held.pop("by", None) == held.pop("by", None)
    errors = [[found.pop(k) for k in sorted(found) if k.endswith("_error")]
              for found in (far_held, held)]  # fmt: skip
    assert errors[0] == pytest.approx(errors[1], rel=0.01)  # squares of far scores
    assert far_held == pytest.approx(held, rel=1e-4, abs=1e-6) and far_status == status


def test_weights_that_cannot_be_are_refused(case: Any) -> None:
    rows = len(case.data()[1])
    bad = [-torch.ones(rows), torch.full((rows,), torch.nan), torch.zeros(rows), torch.ones(3)]
    for weight in bad:
        with pytest.raises(DataError, match="weight"):
            case.fit(sample_weight=weight)
