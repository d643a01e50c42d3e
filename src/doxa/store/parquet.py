"""Parquet files that do not fit in memory, as memory-mapped arrays from which `fit` reads batches.

    x, y = doxa.store.parquet("rides.parquet", target="fare")
    posterior = doxa.fit(net, (x, y), "map")

The file is converted once, in blocks of rows, into two .npy files in a cache in the system's folder
for temporary files. Later calls use the cache if the file has not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from doxa.errors import DataError, MissingExtra, StoreError, did_you_mean
from doxa.store.artefact import readable_errors, sync

Array = np.ndarray[Any, np.dtype[Any]]

_ROWS = 1 << 16  # rows that are decoded at a time


def parquet(
    path: str | os.PathLike[str],
    target: str | Sequence[str],
    columns: Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """Inputs and targets of a Parquet file as read-only memory maps.

    Parameters
    ----------
    path : str or Path
        A Parquet file of numbers and booleans without missing values.
    target : str or sequence of str
        The column to predict, or several. Whole numbers stay whole numbers (classes).
    columns : sequence of str, optional
        The input columns, in this order. Default: all other columns. They become float32 if all
        are booleans or floats of at most 32 bits, else float64.

    Returns
    -------
    tuple of ndarray
        Inputs [N, D], and targets [N], or [N, T] for a list of targets.

    Raises
    ------
    DataError
        A column does not exist, is not numeric or has a missing value (the message names column
        and row), there are no rows, or the file is not a Parquet file.
    StoreError
        The file cannot be read, or the disk is full.
    MissingExtra
        pyarrow is not installed.
    """
    arrow, reader = _import_pyarrow()
    source = Path(path)
    with readable_errors("read", source):
        found = os.stat(source)
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{source} is no regular file but a folder, a pipe or the like")
    try:
        with readable_errors("read", source), reader.ParquetFile(source) as file:
            targets = [target] if isinstance(target, str) else list(target)
            inputs = _inputs(file.schema_arrow, targets, columns, source)
            if file.metadata.num_rows == 0:
                raise DataError(f"{source} has columns but no rows")
            folder = _cache() / _key(source, found, targets, inputs)
            if not folder.exists():
                _convert(arrow, file, inputs, targets, folder, source)
    except arrow.ArrowException as error:
        first = (str(error).splitlines() or [""])[0]
        raise DataError(f"{source} cannot be read as Parquet: {first}") from error
    x, y = (np.load(folder / name, mmap_mode="r") for name in ("x.npy", "y.npy"))
    return x, y[:, 0] if isinstance(target, str) else y


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(
            "reading Parquet needs the extra 'tables': pip install 'doxa[tables]'"
        ) from error
    return pyarrow, pyarrow.parquet


def _inputs(
    schema: Any, targets: list[str], columns: Sequence[str] | None, source: Path
) -> list[str]:
    """The names of the input columns, after checks that all requested columns exist and are
    numeric."""
    if not targets:
        raise DataError("parquet needs a target: the name of the column to predict")
    chosen = [n for n in schema.names if n not in targets] if columns is None else list(columns)
    for name in [*targets, *chosen]:
        if name not in schema.names:
            raise DataError(f"{source} has no column {name!r}{did_you_mean(name, schema.names)}")
        if schema.names.count(name) > 1:
            raise DataError(f"{source} has {schema.names.count(name)} columns named {name!r}")
        kind = _dtype(schema, name)
        if kind is None:
            raise DataError(
                f"{source}: column {name!r} holds {schema.field(name).type}, not numbers; leave it "
                "out with columns=[...], or encode it first"
            )
    both = sorted(set(targets) & set(chosen))
    if both:
        raise DataError(f"{both[0]!r} is the target and cannot be an input too")
    if not chosen:
        raise DataError(f"{source} has no input column besides the target")
    return chosen


def _dtype(schema: Any, name: str) -> np.dtype[Any] | None:
    """The NumPy type of a column; None if it is not numeric."""
    try:
        dtype = np.dtype(schema.field(name).type.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        return None
    return dtype if dtype.kind in "biuf" else None


def _common(schema: Any, names: list[str], whole: bool) -> np.dtype[Any]:
    """One type for several columns: int64 if whole numbers may stay, else a float."""
    kinds = [_dtype(schema, name) for name in names]
    if whole and all(kind is not None and kind.kind in "biu" for kind in kinds):
        return np.dtype(np.int64)
    narrow = all(
        kind is not None and (kind.kind == "b" or (kind.itemsize <= 4 and kind.kind == "f"))
        for kind in kinds
    )
    return np.dtype(np.float32 if narrow else np.float64)


def _convert(
    arrow: Any, file: Any, inputs: list[str], targets: list[str], folder: Path, source: Path
) -> None:
    """Write both arrays to a temporary folder, then rename it to `folder`, which is therefore
    complete or does not exist."""
    fresh = folder.with_name(f".tmp-{secrets.token_hex(8)}")
    schema, rows = file.schema_arrow, file.metadata.num_rows
    with readable_errors("written", folder):
        os.mkdir(fresh)
        try:
            parts = {"x.npy": (inputs, False), "y.npy": (targets, True)}
            maps = {
                name: np.lib.format.open_memmap(
                    fresh / name, "w+", _common(schema, names, whole), (rows, len(names))
                )
                for name, (names, whole) in parts.items()
            }
            _reserve(fresh, maps)
            start = 0
            for batch in file.iter_batches(_ROWS, columns=[*inputs, *targets]):
                for name, (names, _) in parts.items():
                    for j, column in enumerate(names):
                        values = _values(batch.column(column), column, start, source)
                        maps[name][start : start + len(values), j] = values
                start += batch.num_rows
            for name, array in maps.items():
                array.flush()
                sync(fresh / name)
            with contextlib.suppress(OSError):  # another process has written the same arrays
                os.rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    if not folder.exists():
        raise StoreError(f"{folder} could not be written")


def _reserve(folder: Path, maps: dict[str, Any]) -> None:
    """Reserve the space on disk before anything is written. On a full disk, writing to a memory map
    would end the process without an error message."""
    if not hasattr(os, "posix_fallocate"):
        return
    for name in maps:
        descriptor = os.open(folder / name, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)


def _values(column: Any, name: str, start: int, source: Path) -> Array:
    if column.null_count:
        row = start + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{source}: column {name!r} is missing at row {row}; fill or remove it")
    return column.to_numpy(zero_copy_only=False)


def _cache() -> Path:
    """The folder of the cache, among the temporary files. Each user has their own."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    folder = Path(tempfile.gettempdir()) / f"doxa-parquet-{user}"
    with readable_errors("written", folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        if hasattr(os, "getuid") and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
            raise StoreError(f"{folder} belongs to another user; set TMPDIR to a folder of yours")
    return folder


def _key(source: Path, found: os.stat_result, targets: list[str], inputs: list[str]) -> str:
    """A key that changes with the file and with the requested columns."""
    facts = [str(source.resolve()), found.st_size, found.st_mtime_ns, found.st_ino, targets, inputs]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
