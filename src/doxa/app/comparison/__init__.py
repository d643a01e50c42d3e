"""Comparison of methods on one data set: scores, calibration, cost, distance to a reference."""

from doxa.app.comparison.compare import compare_arrays, compare_tables
from doxa.app.comparison.reference import Reference, reference_of
from doxa.app.comparison.result import Comparison, Row, as_tables
from doxa.selection.splits import Split, random_splits

__all__ = [
    "Comparison", "Reference", "Row", "Split", "as_tables", "compare_arrays", "compare_tables",
    "random_splits", "reference_of",
]  # fmt: skip
