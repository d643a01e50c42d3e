"""Checks of the data: too few rows, rows in both sets, and scaling.

`sample_size` compares the number of rows with the number of input directions. `duplicates` looks
for test rows among the training rows. `scaling` looks for inputs that are not standardised, for
training and test sets in different units, and for scales that were computed with the test rows.
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
_ROWS_PER_DIRECTION = 5


def sample_size(case: DiagnosticData, head: Head) -> Finding:
    """The number of rows per independent direction of the inputs.

    The number of directions is the participation ratio (Σλ)² / Σλ² of the eigenvalues of the
    inputs' correlation matrix: the number of columns if they are uncorrelated, else fewer."""
    rows = case.rows
    small = _rarest(head.train, rows)
    if small is not None:
        return small
    model = case.base.model
    size = "" if model is None else f" for {model.layout.size} parameters"
    advice = any_of(MORE_ROWS, narrower_prior(case), another(case, "gp", "linear", "laplace"))
    if rows < _FEW_ROWS:
        return bad(f"{rows} rows{size} are very few to learn from", advice, float(rows))
    directions = _directions(case.train.columns)
    each = rows / (1 + directions)
    message = f"{rows} rows{size}; inputs vary in {directions:.0f} independent directions"
    if each < _ROWS_PER_DIRECTION:
        grade = bad if each < 2 else warning
        return grade(f"very few rows to learn from: {message}", advice, each)
    return good(message, each)


def _rarest(train: Scored, rows: int) -> Finding | None:
    """A finding if a class has very few rows."""
    if not train.classifies:
        return None
    counts = torch.bincount(train.y.long(), minlength=train.probs.shape[1])
    share = rows / max(1, len(train))
    least, which = float(counts.min()) * share, int(counts.argmin())
    if least >= 5:
        return None
    return warning(
        f"class {which} has {least:.0f} rows: too few to learn it, or to evaluate it",
        "more rows of that class, or drop it",
        least,
    )


def _directions(columns: Tensor) -> float:
    varying = columns[:, columns.std(0) > 0] if len(columns) > 1 else columns[:, :0]
    if varying.shape[1] == 0:
        return 0.0
    table = (varying - varying.mean(0)) / varying.std(0)
    square = torch.linalg.svdvals(table).square()
    return float(square.sum().square() / square.square().sum())


def duplicates(case: DiagnosticData) -> Finding:
    """Test rows that are also training rows, if more often than training rows repeat."""
    if case.test is None:
        return skipped("there are no test rows", NEW_ROWS)
    seen, new = (_keys(s.columns) for s in (case.train, case.test))
    repeated = len(seen) - len(set(seen))
    known = set(seen)
    shared = sum(key in known for key in new)
    natural = (1 + repeated) / (2 + len(seen))
    message = f"{shared} of {len(new)} test rows are also training rows"
    if shared >= 3 and binomial_upper(shared, len(new), natural) < ALPHA:
        return bad(
            message + ": scores on them are meaningless",
            "split before copying or augmenting; remove duplicates first",
            shared / len(new),
        )
    return good(message, shared / len(new))


def _keys(columns: Tensor) -> list[bytes]:
    table = columns.float().contiguous().numpy()
    return [row.tobytes() for row in table]


_LEAST_ROWS = 20
_SHIFTED = 2.0  # interquartile ranges
_STRETCHED = 4.0
_LARGE = 10.0  # root mean square of a column that was not standardised


def scaling(case: DiagnosticData) -> Finding:
    """Inputs that are not standardised, units that differ between train and test, and scales that
    were computed with the test rows."""
    train = case.train.columns
    found = _against_fit(case, train)
    if found is None and case.test is not None:
        test = case.test.columns
        if test.shape[1] == train.shape[1]:
            found = _own_scale(case, train, test) or _units(case, train, test)
        found = found or _leaked_targets(case, case.test)
    if found is None:
        found = _unit_size(case, train)
    if found is not None:
        return found
    if case.test is None:
        return good("inputs are on a scale that can be learned from")
    return good("train and test inputs are on the same scale, computed without the test rows")


def _against_fit(case: DiagnosticData, train: Tensor) -> Finding | None:
    """Compare the given rows with the location and scale that the posterior stores."""
    scales = case.posterior.scales
    if not isinstance(scales.x_loc, Tensor) or len(train) < _LEAST_ROWS:
        return None
    loc, scale = (t.double().cpu().reshape(1, -1) for t in (scales.x_loc, scales.x_scale))
    away = float(((train.mean(0) - loc) / scale).abs().max())
    stretch = float((train.std(0) / scale).clamp_min(1e-12).log().abs()[_varies(train)].max())
    if away < 0.5 and stretch < 0.7:
        return None
    return bad(
        f"these are not the rows of the fit: the mean of a column differs from that of the fit by "
        f"{away:.2g} standard deviations",
        "pass x to diagnose as it was passed to fit, in its original units",
        away,
    )


def _left_to_fit(case: DiagnosticData, text: str) -> Advice:
    raw = "pass raw rows, and let fit scale them"
    return any_of(text, coded(raw, refit(case, standardize=True)))


def _varies(columns: Tensor) -> Tensor:
    return (columns.std(0) > 0).unsqueeze(0)


def _own_scale(case: DiagnosticData, train: Tensor, test: Tensor) -> Finding | None:
    """Raw columns never have a mean of exactly 0 and a standard deviation of exactly 1 (or a range
    of exactly [0, 1]): the rows that do are those from which the scales were computed."""
    if _is_scaled(test) and not _same_rows(train, test):
        return bad(
            "the test rows were standardised by themselves: their columns have mean 0 and standard "
            "deviation 1 exactly, in other units than the training rows",
            _left_to_fit(case, "scale the test rows by the training rows' mean and deviation"),
            0.0,
        )
    if _is_scaled(torch.cat([train, test])) and not _is_scaled(train):
        return bad(
            "the scales were computed with the test rows: columns of train and test together have "
            "mean 0 and standard deviation 1 (or range 0 to 1) exactly, those of train alone do "
            "not",
            _left_to_fit(case, "split first, then scale by the training rows"),
            0.0,
        )
    return None


def _same_rows(train: Tensor, test: Tensor) -> bool:
    return train.shape == test.shape and bool(torch.equal(train, test))


def _is_scaled(columns: Tensor) -> bool:
    """Whether the columns were standardised with exactly these rows, by either definition of the
    standard deviation, or by range. Errors of single precision are about 1e-6."""
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
    """Whether no column is a flag; the range of a flag is always 0 to 1."""
    return all(len(column.unique()) > 10 for column in table.T)


def _units(case: DiagnosticData, train: Tensor, test: Tensor) -> Finding | None:
    """Compare medians and interquartile ranges per column: robust, and far beyond chance."""
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
    dates = _dates(case, len(wide))
    if bool(dates[wide][shifted].all()):
        return warning(
            "the test rows are of other dates than the training rows: the median of a date lies up "
            f"to {float(away[shifted].max()):.2g} interquartile ranges away, so the fit "
            "extrapolates in time",
            "evaluate the fit on later rows: fit(time=...), or doxa fit --time COLUMN",
            float(away.max()),
        )
    return bad(
        f"test inputs are in other units, or from another distribution: in {int(shifted.sum())} of "
        f"{len(wide)} columns the median lies up to {float(away.max()):.2g} interquartile ranges "
        f"away, or the spread differs up to {float(stretch.max().exp()):.2g} times",
        _left_to_fit(case, "scale train and test by the same numbers (those of train)"),
        float(away.max()),
    )


def _dates(case: DiagnosticData, inputs: int) -> Tensor:
    """Which inputs were made from the dates of a table, [D]; none if the posterior has no table."""
    mask: list[bool] = []
    for column in case.base.metadata.get("table", {}).get("columns", ()):
        parts, width = column.get("parts") or (), len(column.get("categories") or (0,))
        mask += [True] * len(parts) if parts else [False] * width
        mask += [False] * bool(column.get("indicator"))
    return torch.tensor(mask if len(mask) == inputs else [False] * inputs, dtype=torch.bool)


def _leaked_targets(case: DiagnosticData, test: Sample) -> Finding | None:
    train = case.train
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
        _left_to_fit(case, "split first, then scale"),
        0.0,
    )


def _unit_size(case: DiagnosticData, train: Tensor) -> Finding | None:
    """A finding if a network has inputs or targets that are not of about unit size."""
    base = case.base
    if base.model is None and base.kind != "process":
        return None
    size = train.square().mean(0).sqrt()
    if base.scales.x_loc is None and float(size.max()) > _LARGE:
        return warning(
            f"inputs are not standardised: a column has root mean square {float(size.max()):.3g}, "
            "too large for priors and learning rates that are made for unit inputs",
            coded("standardise x and y", refit(case, standardize=True)),
            float(size.max()),
        )
    y = case.train.y
    if isinstance(y, Tensor) and base.base_likelihood.scales_targets and base.scales.y_loc is None:
        large = float(y.double().square().mean().sqrt())
        if large > _LARGE:
            return warning(
                f"targets are not standardised: their root mean square is {large:.3g}, too large "
                "for priors and learning rates that are made for unit targets",
                coded("standardise y, results stay in its units", refit(case, standardize=True)),
                large,
            )
    return None
