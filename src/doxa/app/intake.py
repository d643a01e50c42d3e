"""From a file to rows and their meaning: what every command on tables begins with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doxa.app.reading import Dialect
from doxa.app.schema import MISSING_CELLS, Schema, infer_schema, with_target
from doxa.app.tables import open_table
from doxa.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Asked:
    """What a user says of a table, instead of leaving it to recognition."""

    target: str
    likelihood: str | None = None
    index: str | None = None
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    missing: str = "error"
    dialect: Dialect = field(default_factory=Dialect)

    def __post_init__(self) -> None:
        if self.missing not in MISSING_CELLS:
            raise DataError(f"--missing takes error or impute, not {self.missing!r}")

    def facts(self) -> dict[str, Any]:
        """For the record of a run, the target aside, which its schema has."""
        said = asdict(self)
        return {k: v for k, v in said.items() if k not in ("target", "dialect")} | said["dialect"]


def take_in(path: Path, asked: Asked) -> tuple[pd.DataFrame, Schema]:
    """The rows that can be used, and what their columns mean."""
    frame, dialect, notes = open_table(path, asked.index, dialect=asked.dialect)
    frame, fewer = with_target(frame, asked.target, asked.missing)
    schema = inferred(frame, asked, dialect)
    return frame, replace(schema, notes=(*notes, *fewer, *schema.notes))


def inferred(frame: pd.DataFrame, asked: Asked, dialect: Dialect | None) -> Schema:
    """What the columns of some rows mean; their target is known."""
    return infer_schema(
        frame, asked.target, asked.likelihood, asked.drop, asked.categorical, asked.index,
        asked.numeric, asked.missing, dialect,
    )  # fmt: skip


def take_in_more(path: Path, schema: Schema, dialect: Dialect) -> tuple[pd.DataFrame, list[str]]:
    """Rows for a schema that is there already, and what to tell the user of their file."""
    frame, _, notes = open_table(path, schema.index, index_needed=False, dialect=dialect)
    return frame, notes


def take_in_known(path: Path, schema: Schema, dialect: Dialect) -> tuple[pd.DataFrame, list[str]]:
    """The same for rows whose target is to be known: to score by."""
    frame, notes = take_in_more(path, schema, dialect)
    frame, fewer = with_target(frame, schema.target, schema.missing)
    return frame, notes + fewer
