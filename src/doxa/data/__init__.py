"""What goes in: rows, checked, standardised and handed out in batches."""

from doxa.data.batches import Batch, Batches, Data, NoRows, Pass
from doxa.data.rows import as_tensor, as_tensors, cast, check_finite, free_memory, parse, rows_of
from doxa.data.scaling import Standardisation, standardise

__all__ = [
    "Batch",
    "Batches",
    "Data",
    "NoRows",
    "Pass",
    "Standardisation",
    "as_tensor",
    "as_tensors",
    "cast",
    "check_finite",
    "free_memory",
    "parse",
    "rows_of",
    "standardise",
]
