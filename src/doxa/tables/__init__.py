"""Tables with named columns: how a file is read, and how its columns become the network's inputs.

`doxa.tabular` fits and predicts with them; the command line and the estimators of `doxa.sklearn`
use the same encoders.
"""

from __future__ import annotations

from doxa.tables.files import Table, read_table
from doxa.tables.reading import Dialect
from doxa.tables.schema import Schema, TableSpec

__all__ = ["Dialect", "Schema", "Table", "TableSpec", "read_table"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
