"""A saved run as a server: `doxa serve RUN`.

    GET  /health    ready, the name, method, version and status of the run
    GET  /schema    the columns that it wants, the target, and the columns of a prediction
    POST /predict   rows as JSON or as an Arrow stream; the columns of `doxa predict`

JSON is a list of objects by column name, {"rows": [...]}, or {"columns": {name: [...]}}; the last
two may have a "level". An Arrow stream (application/vnd.apache.arrow.stream) has numbers,
true/false, text, dates and dictionaries of text, without compression; its level is in the query.
The answer has the form of the request unless the Accept header names the other.

A request is read, predicted and answered by one thread (`doxa.app.serve.batching`), so that the
loop that talks to the clients never waits for a computation.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import numpy as np

import doxa
from doxa.app.serve.batching import Batcher, Columns, RequestRows
from doxa.app.task_tables import check_context
from doxa.errors import DataError
from doxa.http import (
    JSON,
    Guard,
    Headers,
    Limits,
    Refusal,
    import_server,
    json_bytes,
    may_see,
    parse_json,
    read_body,
    single,
    slot,
)
from doxa.tables.predictions import conformal_level, output_names
from doxa.tables.reading import import_pandas
from doxa.tables.schema import IMPUTE, Schema

if TYPE_CHECKING:
    from collections.abc import Callable

ARROW = "application/vnd.apache.arrow.stream"
_SURROGATE = re.compile("[\\ud800-\\udfff]")
_FORMS = "a list of objects, or an object with rows or columns"


def application(
    posterior: Any,
    schema: Schema,
    name: str,
    batcher: Batcher,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    hosts: Sequence[str] | None = None,
    may: Callable[[str, Headers], None] | None = None,
) -> Guard:
    """The server of one run, as an ASGI application.

    Parameters
    ----------
    posterior : Posterior
        The saved run; not one that predicts tasks from a context.
    schema : Schema
        Its columns.
    name : str
        How `/health` calls it.
    batcher : Batcher
        What predicts.
    limits : Limits
        What a request may cost.
    hosts : sequence of str, optional
        The values of the Host header that are answered. Default: any.
    may : callable, optional
        Access, such as `doxa.http.bearer`. Without access, `/health` says only whether the
        server is ready.
    """
    import_server()
    from starlette.responses import Response
    from starlette.routing import Route, Router

    check_context(posterior, False)
    held = [0]

    def said(value: Any, status: int = 200) -> Any:
        return Response(json_bytes(value), status, media_type=JSON)

    async def health(request: Any) -> Any:
        found: dict[str, Any] = {"ready": batcher.alive}
        if may_see(may, request.scope["headers"]):
            status = posterior.status
            found |= {
                "name": name, "method": str(posterior.method.name), "doxa": doxa.__version__,
                "status": str(status), "reason": status.reason, "exact": batcher.exact,
                "waiting": batcher.waiting, "requests": batcher.requests,
                "batches": batcher.batches, "dropped": batcher.dropped,
            }  # fmt: skip
        return said(found, 200 if batcher.alive else 503)

    async def columns(request: Any) -> Any:
        return said(described_schema(posterior, schema))

    async def predict(request: Any) -> Any:
        headers = request.scope["headers"]
        kind = _media(single(headers, b"content-type"))
        reader = {JSON: read_json, ARROW: read_arrow}.get(kind)
        if reader is None:
            raise Refusal(415, f"the body is {JSON} or {ARROW}, by its Content-Type", close=True)
        wanted = _accepted(single(headers, b"accept"), kind)
        level = _level_of(request.scope["query_string"])
        write = write_json if wanted == JSON else write_arrow
        with slot(held, limits.waiting):
            arrived = False
            try:
                async with asyncio.timeout(limits.seconds):
                    body = await read_body(headers, request.receive, limits)
                    arrived = True
                    answer = batcher.submit(lambda: reader(body, schema, limits, level), write)
                    content = await asyncio.wrap_future(answer)
            except TimeoutError:
                what = "no answer" if arrived else "the body did not arrive"
                what += f" within {limits.seconds:g} s: send fewer rows, or try again later"
                raise Refusal(504 if arrived else 408, what, close=True) from None
        return Response(content, media_type=wanted)

    routes = [
        Route("/health", health, methods=["GET"]), Route("/schema", columns, methods=["GET"]),
        Route("/predict", predict, methods=["POST"]),
    ]  # fmt: skip
    return Guard(Router(routes, redirect_slashes=False), hosts, may)


def described_schema(posterior: Any, schema: Schema) -> dict[str, Any]:
    """What a client needs to make a request, as JSON."""
    wanted = []
    for column in schema.columns:
        kind = "category" if column.categories else "date" if column.parts else "number"
        found: dict[str, Any] = {"name": column.name, "kind": kind}
        if column.categories:
            found["categories"] = list(column.categories)
        if column.parts:
            found["layout"] = column.layout
        wanted.append(found)
    target: dict[str, Any] = {"name": schema.target, "likelihood": schema.likelihood}
    if schema.classes is not None:
        target["classes"] = list(schema.classes)
    numbers = schema.classes is None
    return {
        "columns": wanted,
        "missing_cells": "filled" if schema.missing == IMPUTE else "an error",
        "index": schema.index,
        "target": target,
        "prediction": output_names(posterior, schema),
        "units": f"those of {schema.target}" if numbers else "probabilities; entropies in nats",
        "level": conformal_level(posterior) or (0.95 if numbers else None),
    }


def _media(header: str | None) -> str:
    return (header or "").partition(";")[0].strip().lower()


def _accepted(header: str | None, own: str) -> str:
    """JSON or Arrow, by the Accept header; the form of the request if both will do."""
    if not header:
        return own
    named = [
        _media(part) for part in header.split(",") if not part.replace(" ", "").endswith(";q=0")
    ]
    for kind in named:
        if kind in (JSON, ARROW):
            return kind
    if any(kind in ("*/*", "application/*") for kind in named):
        return own
    raise Refusal(406, f"the answer is {JSON} or {ARROW}: name one in Accept", close=True)


def _level_of(query: bytes) -> float | None:
    try:
        found = parse_qs(query.decode("ascii"), strict_parsing=bool(query), max_num_fields=8)
    except ValueError:
        raise Refusal(400, "the query cannot be read; it may have level=0.9") from None
    if unknown := sorted(set(found) - {"level"}):
        raise Refusal(400, f"the query may have a level, not {unknown[0][:100]!r}", close=True)
    if "level" not in found:
        return None
    try:
        return _checked_level(float(found["level"][-1]))
    except ValueError:
        raise Refusal(400, "level is a number between 0 and 1", close=True) from None


def _checked_level(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1.0:
        raise DataError("level is a number between 0 and 1")
    return float(value)


def read_json(
    body: bytes, schema: Schema, limits: Limits, level: float | None = None
) -> RequestRows:
    """The rows of a body, encoded as in the fit.

    Parameters
    ----------
    body : bytes
        JSON.
    schema : Schema
        The columns of the fit. Others are not used, with a note.
    limits : Limits
        Its rows, columns, depth and longest text.
    level : float, optional
        That of the query; one in the body comes first.
    """
    given = parse_json(body, limits.depth)
    if isinstance(given, list):
        given = {"rows": given}
    if not isinstance(given, dict) or ("rows" in given) == ("columns" in given):
        raise Refusal(400, f"the JSON is {_FORMS}")
    if unknown := sorted(set(given) - {"rows", "columns", "level"}):
        raise Refusal(
            400, f"the JSON has {unknown[0][:100]!r}; it is {_FORMS}, and may have a level"
        )
    level = _checked_level(given.get("level", level))
    wanted = _wanted(schema)
    if "rows" in given:
        rows = given["rows"]
        if not isinstance(rows, list):
            raise DataError("rows is a list of objects, one per row")
        _check_size(len(rows), 0, limits)
        names: set[str] = set()
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise DataError(f"row {number} is no object with a value for each column")
            names.update(row)
        _check_size(len(rows), len(names), limits)
        cells = {name: [row.get(name) for row in rows] for name in wanted if name in names}
    else:
        columns = given["columns"]
        if not isinstance(columns, dict):
            raise DataError("columns is an object with a list for each column")
        names = set(columns)
        lengths = set()
        for name, values in columns.items():
            if not isinstance(values, list):
                raise DataError(f"column {name[:100]!r} is no list of cells")
            lengths.add(len(values))
        if len(lengths) > 1:
            raise DataError(f"columns have {min(lengths)} to {max(lengths)} rows: all need as many")
        _check_size(max(lengths, default=0), len(names), limits)
        cells = {name: columns[name] for name in wanted if name in names}
    for name, values in cells.items():
        _check_cells(name, values, limits.text)
    pandas = import_pandas()
    series = {name: pandas.Series(values, name=name) for name, values in cells.items()}
    asked = _encoded(pandas.DataFrame(series), sorted(names), schema, level)
    asked.by_column = "columns" in given
    return asked


def _wanted(schema: Schema) -> list[str]:
    names = [column.name for column in schema.columns]
    return [*names, *([schema.index] if schema.index and schema.index not in names else [])]


def _check_size(rows: int, columns: int, limits: Limits) -> None:
    if rows > limits.rows:
        raise Refusal(413, f"{rows:,} rows, and {limits.rows:,} are predicted at a time at most")
    if columns > limits.columns:
        raise Refusal(413, f"{columns:,} columns, and {limits.columns:,} are read at most")


def _check_cells(name: str, values: Iterable[Any], most: int) -> None:
    for row, cell in enumerate(values):
        if not (cell is None or isinstance(cell, str | int | float)):
            kind = "a list" if isinstance(cell, list) else "an object"
            raise DataError(
                f"column {name!r}, row {row}: {kind} is no cell; a cell is a number, text, true, "
                "false or null"
            )
        if isinstance(cell, str) and _SURROGATE.search(cell) is not None:
            raise DataError(f"column {name!r}, row {row}: half a character of UTF-16 is no text")
        if isinstance(cell, str) and len(cell) > most:
            raise DataError(f"column {name!r}, row {row}: text of more than {most:,} characters")


def _encoded(frame: Any, names: Sequence[str], schema: Schema, level: float | None) -> RequestRows:
    """The inputs of a table that has the columns of the schema, out of `names`."""
    notes = schema.check_columns(names)
    if len(frame) == 0:
        raise DataError("there are no rows to predict")
    label = None
    if schema.index is not None and schema.index in frame.columns:
        values = frame[schema.index]
        label = schema.index, [None if v is None or v != v else v for v in values.tolist()]
        if schema.index not in {column.name for column in schema.columns}:
            frame = frame.drop(columns=schema.index)
        frame.index = import_pandas().Index(values, name=schema.index)
    x, more = schema.features(frame)
    return RequestRows(x, level, label, [*notes, *more])


def write_json(asked: RequestRows, found: Columns) -> bytes:
    """The answer: rows or columns, as they were asked, and notes."""
    columns = {name: _plain(values) for name, values in found.items()}
    if asked.label is not None:
        columns = {asked.label[0]: [_cell(v) for v in asked.label[1]], **columns}
    if asked.by_column:
        return json_bytes({"columns": columns, "notes": asked.notes})
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json_bytes({"rows": rows, "notes": asked.notes})


def _plain(values: Any) -> list[Any]:
    """Cells of JSON: null for a number that is not finite."""
    if values.dtype.kind == "f":
        return [
            v if ok else None for v, ok in zip(values.tolist(), np.isfinite(values), strict=True)
        ]
    return [_cell(v) for v in values.tolist()]


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def read_arrow(
    body: bytes, schema: Schema, limits: Limits, level: float | None = None
) -> RequestRows:
    """The rows of an Arrow IPC stream, encoded as in the fit.

    The stream is walked message by message before a value is read: compressed buffers and more rows
    than the limit are refused from the headers of the messages.

    Parameters
    ----------
    body : bytes
        The stream.
    schema : Schema
        The columns of the fit. Others are not used, with a note.
    limits : Limits
        Its rows, columns and longest text.
    level : float, optional
        The level of intervals and sets.
    """
    import pyarrow
    from pyarrow import compute, ipc, types

    if not body.endswith(_END):
        raise Refusal(400, "the body is no Arrow stream, or it has no end")
    try:
        messages = ipc.MessageReader.open_stream(pyarrow.py_buffer(body))
        rows = 0
        for message in messages:
            if message.type == "tensor" or message.type == "sparse tensor":
                raise DataError("the Arrow stream holds a tensor, not a table")
            rows += _batch_rows(message.metadata.to_pybytes(), limits.rows)
            _check_size(rows, 0, limits)
        with ipc.open_stream(pyarrow.py_buffer(body)) as stream:
            names = [str(name) for name in stream.schema.names]
            _check_size(rows, len(names), limits)
            wanted = [name for name in _wanted(schema) if name in names]
            if twice := [name for name in wanted if names.count(name) > 1]:
                raise DataError(f"there are {names.count(twice[0])} columns named {twice[0]!r}")
            for field in (stream.schema.field(name) for name in wanted):
                kind = field.type.value_type if types.is_dictionary(field.type) else field.type
                if not _readable(types, kind):
                    raise DataError(
                        f"column {field.name!r} holds {str(field.type)[:100]}: not read"
                    )
            table = pyarrow.Table.from_batches(list(stream), stream.schema).select(wanted)
        table.validate(full=True)
        for name in wanted:
            column = table.column(name)
            for values in (
                [c.dictionary for c in column.chunks]
                if types.is_dictionary(column.type)
                else [column]
            ):
                if types.is_string(values.type) or types.is_large_string(values.type):
                    longest = compute.max(compute.binary_length(values)).as_py() or 0
                    if longest > limits.text:
                        raise DataError(f"column {name!r} has text of {longest:,} bytes")
        frame = table.replace_schema_metadata(None).to_pandas()
    except (DataError, Refusal):
        raise
    except (
        pyarrow.ArrowException, struct.error, ValueError, OSError, OverflowError, KeyError,
        TypeError,
    ) as error:  # fmt: skip
        first = (str(error).splitlines() or [""])[0]
        raise Refusal(400, f"the body is no Arrow stream that can be read: {first[:200]}") from None
    return _encoded(frame, names, schema, level)


def _readable(types: Any, kind: Any) -> bool:
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        or types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)
        or types.is_date(kind) or types.is_timestamp(kind)
    )  # fmt: skip


_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of a stream; without it, rows may be missing
_DICTIONARY, _RECORDS = 2, 3  # the kinds of a message's header in Arrow's format


def _batch_rows(metadata: bytes, most: int) -> int:
    """The rows of a message (Arrow's Message.fbs, a flatbuffer); an error if it is compressed."""
    message = struct.unpack_from("<I", metadata, 0)[0]
    kind_at, header_at = _field(metadata, message, 1), _field(metadata, message, 2)
    if kind_at is None or header_at is None:
        return 0
    kind = metadata[kind_at]
    if kind not in (_DICTIONARY, _RECORDS):
        return 0
    batch = header_at + struct.unpack_from("<I", metadata, header_at)[0]
    if kind == _DICTIONARY:
        data_at = _field(metadata, batch, 1)
        if data_at is None:
            return 0
        batch = data_at + struct.unpack_from("<I", metadata, data_at)[0]
    if _field(metadata, batch, 3) is not None:
        raise DataError("the Arrow stream is compressed: write it without compression")
    length_at = _field(metadata, batch, 0)
    length = 0 if length_at is None else struct.unpack_from("<q", metadata, length_at)[0]
    if length < 0:
        raise ValueError("a batch of a negative number of rows")
    return 0 if kind == _DICTIONARY else int(length)


def _field(data: bytes, table: int, number: int) -> int | None:
    """The place of a field of a flatbuffer's table; None if it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise ValueError("a damaged message")
    size = struct.unpack_from("<H", data, vtable)[0]
    at = 4 + 2 * number
    if at + 2 > size:
        return None
    offset = struct.unpack_from("<H", data, vtable + at)[0]
    if offset and table + offset >= len(data):
        raise ValueError("a damaged message")
    return table + offset if offset else None


def write_arrow(asked: RequestRows, found: Columns) -> bytes:
    """The answer as an Arrow stream; the notes are in the metadata of its schema, as JSON."""
    import pyarrow

    arrays = {name: pyarrow.array(values, from_pandas=False) for name, values in found.items()}
    if asked.label is not None:
        label, values = asked.label
        if len({type(value) for value in values} - {type(None)}) > 1 or any(
            isinstance(value, str | int) and not isinstance(value, bool) for value in values
        ):  # text, also for whole numbers of any size
            plain = (None if v is None else str(v) for v in values)
            values = [v and v.encode("utf-8", "replace").decode("utf-8") for v in plain]
        arrays = {label: pyarrow.array(values), **arrays}
    table = pyarrow.table(arrays)
    table = table.replace_schema_metadata({"doxa.notes": json.dumps(asked.notes)})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    found_bytes: bytes = sink.getvalue().to_pybytes()
    return found_bytes
