"""What goes in: rows, checked, standardised and handed out in batches."""

from doxa.data.batches import Batch, Data, NoData, batch_rows
from doxa.data.fitted_rows import FittedRows
from doxa.data.frames import Names, in_order
from doxa.data.loaders import blocks, gathered
from doxa.data.rows import as_tensor, as_tensors, cast, check_finite, free_memory, parse, rows_of
from doxa.data.scaling import Standardisation, standardise, warn_far, warn_unscaled
from doxa.data.sources import Ask, Batches, Feed, NoRows, Pass, Source, source
from doxa.data.task_sampler import TaskSampler
from doxa.data.tasks import Tasks, halved

__all__ = [
    "Ask",
    "Batch",
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
    "TaskSampler",
    "Tasks",
    "as_tensor",
    "as_tensors",
    "batch_rows",
    "blocks",
    "cast",
    "check_finite",
    "free_memory",
    "gathered",
    "halved",
    "in_order",
    "parse",
    "rows_of",
    "source",
    "standardise",
    "warn_far",
    "warn_unscaled",
]
