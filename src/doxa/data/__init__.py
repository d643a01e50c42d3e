"""The data of a fit: rows that are read, checked, standardised and split into batches."""

from doxa.data.batches import (
    Batch,
    Batches,
    BatchRequest,
    Data,
    Feed,
    NoData,
    NoRows,
    Pass,
    Source,
    batch_rows,
    source,
)
from doxa.data.fitted_rows import FittedRows
from doxa.data.rows import (
    Names,
    as_tensor,
    as_tensors,
    blocks,
    cast,
    check_finite,
    free_memory,
    join_batches,
    parse,
    reorder_columns,
    rows_of,
)
from doxa.data.scaling import Standardisation, standardise, warn_far, warn_unscaled
from doxa.data.streams import Stream, read_csv, read_parquet, stream
from doxa.data.tasks import Tasks, TaskSampler, condition_on_half
from doxa.data.tokens import IGNORED, next_token, pad, without_labels

__all__ = [
    "IGNORED",
    "Batch",
    "BatchRequest",
    "Batches",
    "Data",
    "Feed",
    "FittedRows",
    "Names",
    "NoData",
    "NoRows",
    "Pass",
    "Source",
    "Standardisation",
    "Stream",
    "TaskSampler",
    "Tasks",
    "as_tensor",
    "as_tensors",
    "batch_rows",
    "blocks",
    "cast",
    "check_finite",
    "condition_on_half",
    "free_memory",
    "join_batches",
    "next_token",
    "pad",
    "parse",
    "read_csv",
    "read_parquet",
    "reorder_columns",
    "rows_of",
    "source",
    "standardise",
    "stream",
    "warn_far",
    "warn_unscaled",
    "without_labels",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
