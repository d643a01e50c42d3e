"""What is wrong with the rows themselves: too few of them, or the same ones in both sets.

Units: inputs that a network cannot digest, sets scaled differently, scales that leak.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.diagnose.advice import (
    MORE_ROWS,
    NEW_ROWS,
    Advice,
    another,
    any_of,
    coded,
    narrower_prior,
    refit,
)
from doxa.diagnose.data import ALPHA, DiagnosticData, Head, Sample, Scored, binomial_upper
from doxa.diagnose.finding import Finding, bad, good, skipped, warning

_FEW_ROWS = 20
_ROWS_A_DIRECTION = 5


def sample_size(patient: DiagnosticData, head: Head) -> Finding:
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


def duplicates(patient: DiagnosticData) -> Finding:
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


_LEAST_ROWS = 20
_SHIFTED = 2.0  # interquartile ranges
_STRETCHED = 4.0
_LARGE = 10.0  # root mean square of a column that a network was given as it is


def scaling(patient: DiagnosticData) -> Finding:
    """Inputs that a network cannot digest, units that differ between train and test, and scales
    that were computed with the test rows."""
    train = patient.train.columns
    found = _against_fit(patient, train)
    if found is None and patient.test is not None:
        test = patient.test.columns
        if test.shape[1] == train.shape[1]:
            found = _own_scale(patient, train, test) or _units(patient, train, test)
        found = found or _leaked_targets(patient, patient.test)
    if found is None:
        found = _digestible(patient, train)
    if found is not None:
        return found
    if patient.test is None:
        return good("inputs are on a scale that can be learned from")
    return good("train and test inputs are on the same scale, which knows nothing of the test rows")


def _against_fit(patient: DiagnosticData, train: Tensor) -> Finding | None:
    """The rows given against those whose location and scale the posterior stores."""
    scales = patient.posterior.scales
    if not isinstance(scales.x_loc, Tensor) or len(train) < _LEAST_ROWS:
        return None
    loc, scale = (t.double().cpu().reshape(1, -1) for t in (scales.x_loc, scales.x_scale))
    away = float(((train.mean(0) - loc) / scale).abs().max())
    stretch = float((train.std(0) / scale).clamp_min(1e-12).log().abs()[_varies(train)].max())
    if away < 0.5 and stretch < 0.7:
        return None
    return bad(
        f"these are not the rows of the fit: a column's mean lies {away:.2g} of the fit's standard "
        "deviations from where it was",
        "give the doctor x as it was given to fit, in its original units",
        away,
    )


def _left_to_fit(patient: DiagnosticData, words: str) -> Advice:
    raw = "give raw rows, and leave the scaling to fit"
    return any_of(words, coded(raw, refit(patient, standardize=True)))


def _varies(columns: Tensor) -> Tensor:
    return (columns.std(0) > 0).unsqueeze(0)


def _own_scale(patient: DiagnosticData, train: Tensor, test: Tensor) -> Finding | None:
    """Means of exactly 0 with spreads of exactly 1 (or ranges of exactly [0, 1]) do not happen:
    whichever rows have them are the rows that the scales came from."""
    if _is_scaled(test) and not _same_rows(train, test):
        return bad(
            "the test rows were standardised by themselves: their columns have mean 0 and standard "
            "deviation 1 exactly, in other units than the training rows",
            _left_to_fit(patient, "scale the test rows by the training rows' mean and deviation"),
            0.0,
        )
    if _is_scaled(torch.cat([train, test])) and not _is_scaled(train):
        return bad(
            "the scales were computed with the test rows: columns of train and test together have "
            "mean 0 and standard deviation 1 (or range 0 to 1) exactly, those of train alone do "
            "not",
            _left_to_fit(patient, "split first, then scale by the training rows"),
            0.0,
        )
    return None


def _same_rows(train: Tensor, test: Tensor) -> bool:
    return train.shape == test.shape and bool(torch.equal(train, test))


def _is_scaled(columns: Tensor) -> bool:
    """Standardised on exactly these rows, by either convention for the spread, or by range.
    Single precision leaves about 1e-6."""
    if len(columns) < 5:
        return False
    table = columns[:, columns.std(0) > 1e-12]
    if table.shape[1] == 0:
        return False
    centred = table.mean(0).abs() < 1e-5
    one = [(table.std(0, correction=c) - 1).abs() < 1e-5 for c in (0, 1)]
    ranged = (table.amin(0).abs() < 1e-6) & ((table.amax(0) - 1).abs() < 1e-6)
    standard = bool((centred & one[0]).all() or (centred & one[1]).all())
    return standard or (bool(ranged.all()) and _is_continuous(table))


def _is_continuous(table: Tensor) -> bool:
    """Not flags, whose range is 0 to 1 by nature."""
    return all(len(column.unique()) > 10 for column in table.T)


def _units(patient: DiagnosticData, train: Tensor, test: Tensor) -> Finding | None:
    """Medians and interquartile ranges, column by column: robust, and far beyond chance."""
    if len(test) < _LEAST_ROWS or len(train) < _LEAST_ROWS:
        return None
    levels = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    a, b = (torch.quantile(t, levels, dim=0) for t in (train, test))
    wide = (a[2] - a[0] > 0) & (b[2] - b[0] > 0)
    if not bool(wide.any()):
        return None
    away = ((b[1] - a[1]).abs() / (a[2] - a[0]))[wide]
    stretch = ((b[2] - b[0]) / (a[2] - a[0]))[wide].log().abs()
    shifted = (away > _SHIFTED) | (stretch.exp() > _STRETCHED)
    if not bool(shifted.any()):
        return None
    return bad(
        f"test inputs are in other units, or from elsewhere: in {int(shifted.sum())} of "
        f"{len(wide)} columns the median lies up to {float(away.max()):.2g} interquartile ranges "
        f"away, or the spread differs up to {float(stretch.max().exp()):.2g} times",
        _left_to_fit(patient, "scale train and test by the same numbers (those of train)"),
        float(away.max()),
    )


def _leaked_targets(patient: DiagnosticData, test: Sample) -> Finding | None:
    train = patient.train
    y = [s.y for s in (train, test) if isinstance(s.y, Tensor) and s.y.is_floating_point()]
    if len(y) < 2 or y[0].shape[1:] != y[1].shape[1:]:
        return None
    a, b = (t.double().cpu().reshape(len(t), -1) for t in y)
    together = torch.cat([a, b])
    if not _is_continuous(together) or _is_scaled(a) or not _is_scaled(together):
        return None
    return bad(
        "the scale of y was computed with the test rows: train and test together have mean 0 and "
        "standard deviation 1 exactly, train alone has not",
        _left_to_fit(patient, "split first, then scale"),
        0.0,
    )


def _digestible(patient: DiagnosticData, train: Tensor) -> Finding | None:
    """A network wants inputs and targets of about unit size."""
    base = patient.base
    if base.model is None and base.kind != "process":
        return None
    size = train.square().mean(0).sqrt()
    if base.scales.x_loc is None and float(size.max()) > _LARGE:
        return warning(
            f"inputs are not standardised: a column has the size {float(size.max()):.3g}, which "
            "priors and learning rates for unit inputs do not fit",
            coded("standardise x and y", refit(patient, standardize=True)),
            float(size.max()),
        )
    y = patient.train.y
    if isinstance(y, Tensor) and base.base_likelihood.scales_targets and base.scales.y_loc is None:
        large = float(y.double().square().mean().sqrt())
        if large > _LARGE:
            return warning(
                f"targets are not standardised: their size is {large:.3g}, which priors and "
                "learning rates for unit targets do not fit",
                coded("standardise y, results stay in its units", refit(patient, standardize=True)),
                large,
            )
    return None
