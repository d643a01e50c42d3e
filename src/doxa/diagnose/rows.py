"""What is wrong with the rows themselves: too few of them, or the same ones in both sets."""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.diagnose.advice import MORE_ROWS, NEW_ROWS, another, any_of, narrower_prior
from doxa.diagnose.finding import Finding, bad, good, skipped, warning
from doxa.diagnose.patient import Head, Patient
from doxa.diagnose.scored import Scored
from doxa.diagnose.significance import ALPHA, binomial_upper

_FEW_ROWS = 20
_ROWS_A_DIRECTION = 5


def sample_size(patient: Patient, head: Head) -> Finding:
    """Rows against the directions that the inputs vary in.

    The number of directions is the participation ratio (Σλ)² / Σλ² of the eigenvalues of the
    inputs' correlation matrix: all columns where they are unrelated, fewer where they are not."""
    rows = patient.rows
    small = _rarest(head.train, rows)
    if small is not None:
        return small
    model = patient.base.model
    size = "" if model is None else f" for {model.layout.size} parameters"
    advice = any_of(MORE_ROWS, narrower_prior(patient), another(patient, "gp", "linear", "laplace"))
    if rows < _FEW_ROWS:
        return bad(f"{rows} rows{size} are very little to learn from", advice, float(rows))
    directions = _directions(patient.train.columns)
    each = rows / (1 + directions)
    told = f"{rows} rows{size}; inputs vary in {directions:.0f} independent directions"
    if each < _ROWS_A_DIRECTION:
        grade = bad if each < 2 else warning
        return grade(f"very little to learn from: {told}", advice, each)
    return good(told, each)


def _rarest(train: Scored, rows: int) -> Finding | None:
    """A class that hardly occurs."""
    if not train.classifies:
        return None
    counts = torch.bincount(train.y.long(), minlength=train.probs.shape[1])
    share = rows / max(1, len(train))
    least, which = float(counts.min()) * share, int(counts.argmin())
    if least >= 5:
        return None
    return warning(
        f"class {which} has {least:.0f} rows: too few to learn it, or to judge it by",
        "more rows of that class, or leave it out",
        least,
    )


def _directions(columns: Tensor) -> float:
    varying = columns[:, columns.std(0) > 0] if len(columns) > 1 else columns[:, :0]
    if varying.shape[1] == 0:
        return 0.0
    table = (varying - varying.mean(0)) / varying.std(0)
    square = torch.linalg.svdvals(table).square()
    return float(square.sum().square() / square.square().sum())


def duplicates(patient: Patient) -> Finding:
    """Test rows that the fit has seen, more of them than the training rows repeat themselves."""
    if patient.test is None:
        return skipped("there are no test rows", NEW_ROWS)
    seen, new = (_keys(s.columns) for s in (patient.train, patient.test))
    repeated = len(seen) - len(set(seen))
    known = set(seen)
    shared = sum(key in known for key in new)
    natural = (1 + repeated) / (2 + len(seen))
    told = f"{shared} of {len(new)} test rows are also training rows"
    if shared >= 3 and binomial_upper(shared, len(new), natural) < ALPHA:
        return bad(
            told + ": scores on them say nothing",
            "split before copying or augmenting; remove duplicates first",
            shared / len(new),
        )
    return good(told, shared / len(new))


def _keys(columns: Tensor) -> list[bytes]:
    table = columns.float().contiguous().numpy()
    return [row.tobytes() for row in table]
