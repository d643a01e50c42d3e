"""Many methods on one data set: quality, calibration, cost, and closeness to a reference."""

from doxa.app.comparison.compare import compare_arrays
from doxa.app.comparison.from_table import compare_tables
from doxa.app.comparison.reference import Reference, reference_of
from doxa.app.comparison.result import Comparison, Row
from doxa.app.comparison.show import as_tables
from doxa.app.comparison.splits import Split, random_splits

__all__ = [
    "Comparison", "Reference", "Row", "Split", "as_tables", "compare_arrays", "compare_tables",
    "random_splits", "reference_of",
]  # fmt: skip
