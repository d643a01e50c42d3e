"""Fit a table, and predict one: what `doxa fit` and `doxa predict` do, in Python.

    posterior = doxa.fit_table("rents.csv", target="rent")
    p = posterior.predict(new_rows)            # a data frame as it is: text, dates, any order
    predictions = doxa.predict_table(posterior, new_rows)

The columns are read and encoded by `doxa.tables`, which the command line uses too. A run that the
command line has fitted gives the same bits in Python, and the other way round: both fit by
`fit_encoded`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from doxa import nets, registry
from doxa.data import Tasks
from doxa.data.streams import Stream
from doxa.errors import DataError, MethodError, ModelError
from doxa.fit import fit
from doxa.likelihoods import assumed
from doxa.likelihoods import likelihood as likelihood_of
from doxa.method import Method, as_method
from doxa.tables.columns import UNCLEAR, layout_of, may_hold_groups
from doxa.tables.files import Table, open_table, pick
from doxa.tables.predictions import predict_frame
from doxa.tables.reading import Array, Dialect, import_pandas, is_text
from doxa.tables.schema import (
    Schema,
    TableSpec,
    Together,
    groups_of,
    is_large,
    of_table,
    read_more,
    read_stream,
    times_of,
)

if TYPE_CHECKING:
    import pandas as pd

    from doxa.posterior import Posterior

log = logging.getLogger("doxa")

Builder = Callable[[int, int], nn.Module]  # (inputs, outputs) -> network
P = ParamSpec("P")
R = TypeVar("R")


def _named_as_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: errors about a table, which the command line shares, name arguments and not
    options."""

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except DataError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return called


def in_python(text: str) -> str:
    """A message of the command line with its options as arguments: `--missing impute` is
    `missing="impute"`, and `--drop` is `drop=`."""
    text = re.sub(r"--missing (impute|error)\b", r'missing="\1"', text)
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda m: m[1].replace("-", "_") + "=", text)


@_named_as_arguments
def fit_table(
    data: Any,
    target: str,
    method: str | Method | type[Method] = "deep-ensemble",
    *,
    net: nn.Module | Builder | None = None,
    hidden: Sequence[int] = (50,),
    likelihood: str | None = None,
    index: str | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    numeric: Sequence[str] = (),
    missing: str = "error",
    group: str | None = None,
    time: str | None = None,
    time_input: bool = False,
    sep: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    **options: Any,
) -> Posterior:
    """Fit a method to a table, as `doxa fit` does.

    The types of the columns are inferred (docs/tables.md), encoded, and kept with the posterior:
    `posterior.table`. `posterior.predict` then takes data frames as they are, with text, dates and
    columns in any order, and `doxa predict` takes the saved run.

    Parameters
    ----------
    data : DataFrame, Table, str or Path
        The rows, or the file that holds them. A folder of Parquet files, and a file of more than
        1 GiB, are read by windows.
    target : str
        The column to predict. Its type decides between classification and regression.
    method : str or Method, default "deep-ensemble"
        A name (see `doxa.methods()`) or a method object with its settings.
    net : Module or callable, optional
        A network, or a builder that is called as net(inputs, outputs). Default: an MLP.
    hidden : sequence of int, default (50,)
        Hidden widths of the MLP.
    likelihood : str, optional
        A name, such as "student-t" or "counts". Default: by the type of the target.
    index : str, optional
        The column that names the rows.
    drop, categorical, numeric : sequence of str
        Columns that are not used, that are categories, that are numbers.
    missing : {"error", "impute"}, default "error"
        Missing cells are an error, or are filled with the median or the category "missing".
    group, time : str, optional
        The column of groups, or of times: held-out rows are whole groups, or the last rows.
    time_input : bool, default False
        The column of times is an input too.
    sep, decimal, encoding : str, optional
        How a text file is written; by default this is detected.
    **options
        Arguments of `doxa.fit`: members, epochs, lr, seed, validation, checkpoint, progress, ...

    Returns
    -------
    Posterior
        With the schema of its columns, `posterior.table`.

    Examples
    --------
    >>> posterior = doxa.fit_table("rents.csv", target="rent", missing="impute")
    >>> posterior.predict(new_rows).interval(0.9)
    """
    asked = TableSpec(
        target, likelihood, index, _names(drop), _names(categorical), _names(numeric), missing,
        Dialect.asked(sep, decimal, encoding), group, time, time_input,
    )  # fmt: skip
    chosen = as_method(method)
    _check_options(chosen, net, options)
    if not isinstance(data, Table) and isinstance(data, str | Path) and is_large(Path(data)):
        return _fit_windows(Path(data), asked, chosen, net, hidden, options)
    table = _table(data, asked)
    frame, schema = of_table(table, asked)
    x, notes = schema.features(frame)
    y = schema.targets(frame)
    for note in (*schema.notes, *notes):
        log.info(note)
    together = Together.of(frame, schema)
    leaks = leaking_columns(frame, schema, x, y, options.get("seed", 0))
    for leak in leaks:
        log.warning(leak_words(leak))
    made = make_net(net, schema, hidden) if chosen.needs_network else None
    posterior = fit_encoded(schema, made, (x, y), chosen, **together.options(), **options)
    source = "a data frame" if table.source is None else table.source.name
    posterior.metadata["source"] = {"file": source, "rows": len(frame)}
    if leaks:
        posterior.metadata["leakage"] = leaks
    return posterior


def _fit_windows(
    path: Path, asked: TableSpec, method: Method, net: Any, hidden: Sequence[int],
    options: dict[str, Any],
) -> Posterior:  # fmt: skip
    """Fit a table that is read by windows."""
    if method.streams is None or asked.group or asked.time or asked.index:
        what = "group, time and index" if method.streams else f"method {method.name!r}"
        raise MethodError(
            f"{what} cannot be used here: {path} is read by windows, and they need all rows in "
            "memory; fit a sample of the rows"
        )
    rows, schema = read_stream(path, asked)
    for note in schema.notes:
        log.info(note)
    made = make_net(net, schema, hidden) if method.needs_network else None
    posterior = fit_encoded(schema, made, rows, method, **options)
    posterior.metadata["source"] = {"file": path.name, "rows": len(rows)}
    return posterior


@_named_as_arguments
def predict_table(
    posterior: Any,
    data: Any,
    *,
    level: float | None = None,
    missing: str | None = None,
    index: str | None = None,
) -> pd.DataFrame:
    """Predictions of a table as a table, as `doxa predict` writes them.

    Parameters
    ----------
    posterior : Posterior
        Of `doxa.fit_table`, or a loaded run of `doxa fit`.
    data : DataFrame, Table, str or Path
        New rows. Columns are found by name, in any order.
    level : float, optional
        The probability of the interval from low to high, or of the set of classes. Default: the
        level of a conformal posterior, else 0.95 for intervals and no sets.
    missing : {"error", "impute"}, optional
        How missing cells are treated. Default: as in the fit.
    index : str, optional
        The column that names the rows of a file. Default: that of the fit.

    Returns
    -------
    DataFrame
        One row for each row of `data`, with its index. docs/tables.md lists the columns.

    Examples
    --------
    >>> doxa.predict_table(doxa.load("run/"), new_rows, level=0.9)
    """
    schema = posterior.table
    if schema is None:
        raise DataError(
            "this posterior was not fitted to a table with named columns: doxa.fit_table fits one; "
            "posterior.predict takes arrays"
        )
    if level is not None and not 0.0 < level < 1.0:
        raise DataError(f"level must be between 0 and 1, not {level}")
    schema = schema.with_missing(missing)
    if isinstance(data, str | Path):
        frame, notes = read_more(Path(data), schema, Dialect(), index)
    else:
        table = data if isinstance(data, Table) else _of_frame(data)
        frame, notes = table.frame, table.notes
    found, more = predict_frame(posterior, schema, frame, level)
    for note in (*notes, *more):
        log.warning(note)
    return found


def _names(given: Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _check_options(method: Method, net: Any, options: dict[str, Any]) -> None:
    taken = sorted({"data", "model", "likelihood", "groups", "time", "standardize"} & {*options})
    if taken:
        raise MethodError(
            f"fit_table sets {', '.join(taken)} itself: it has likelihood=, group= and time= for "
            "columns, and scales them; doxa.fit takes arrays"
        )
    if registry.methods()[method.name].tasks == ("tasks",):
        raise MethodError(
            f"method {method.name!r} learns from tasks: use doxa.fit with doxa.data.Tasks, or doxa "
            "fit --task"
        )
    if net is not None and not method.needs_network:
        raise MethodError(f"method {method.name!r} needs no network: remove net")


def _table(data: Any, asked: TableSpec) -> Table:
    """The rows to fit."""
    if isinstance(data, str | Path):
        return open_table(data, asked.index, dialect=asked.dialect)
    found = data if isinstance(data, Table) else _of_frame(data)
    if asked.index in (None, found.frame.index.name):
        return found
    name = str(asked.index)
    frame = found.frame.set_index(pick(found.frame, name)).drop(columns=name)
    return Table(frame, found.dialect, found.notes, found.source)


def _of_frame(data: Any) -> Table:
    """A data frame of pandas, or of another library that can give one, as a table."""
    frame = data
    if hasattr(data, "to_pandas"):  # polars, pyarrow
        frame = data.to_pandas()
    if not isinstance(frame, import_pandas().DataFrame):
        raise DataError(
            f"a table is a data frame, the path of a file, or a doxa.Table, not "
            f"{type(data).__name__}; doxa.fit takes arrays"
        )
    if len(frame) == 0:
        raise DataError("the data frame has no rows")
    names = [str(name).strip() for name in frame.columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the data frame has several columns called {twice!r}; rename them")
    return Table(frame.set_axis(names, axis=1))


def make_net(net: Any, schema: Schema, hidden: Sequence[int]) -> nn.Module:
    """The default MLP, the given network, or what a builder returns."""
    if net is None:
        return nets.mlp(schema.inputs, schema.outputs, hidden)
    if isinstance(net, nn.Module):
        return net
    if not callable(net):
        raise ModelError(f"net is a torch.nn.Module or a builder (inputs, outputs), not {net!r}")
    made = net(schema.inputs, schema.outputs)
    if not isinstance(made, nn.Module):
        raise ModelError(f"net gave {type(made).__name__}, not a torch.nn.Module")
    return made


def arguments(
    schema: Schema, data: tuple[Array, Array] | Stream | Tasks, method: Method
) -> dict[str, Any]:
    """The arguments of `doxa.fit` that follow from the table."""
    if schema.classes is not None and "classification" not in registry.methods()[method.name].tasks:
        raise MethodError(
            f"method {method.name!r} is for regression only, and {schema.target!r} is a class; "
            "choose another method, or --likelihood gaussian for a number"
        )
    return {
        "data": (schema.named(data[0]), data[1]) if isinstance(data, tuple) else data,
        "method": method, "standardize": True,
        "likelihood": assumed(schema.likelihood) if schema.assumed else schema.likelihood,
    }  # fmt: skip


def fit_encoded(
    schema: Schema, net: nn.Module | None, data: tuple[Array, Array] | Stream | Tasks,
    method: Method, **options: Any,
) -> Posterior:  # fmt: skip
    """The posterior of encoded rows, with their schema in its metadata. `data` is the pair of
    inputs and targets, or holds the targets itself: a stream, or tasks."""
    posterior: Posterior = fit(net, **arguments(schema, data, method), **options)
    posterior.metadata["table"] = schema.to_json()
    posterior.metadata["method"] = method.name
    return posterior


def leaking_columns(
    frame: pd.DataFrame, schema: Schema, x: Array, y: Array, seed: int
) -> list[dict[str, Any]]:
    """The columns by which rows seem to belong together, if neither `--group` nor `--time` was
    given: `doxa.driver.leakage`. The effect of a category that the fit knows is no leak, so a
    column of categories is tested without its own inputs."""
    if schema.group is not None or schema.time is not None:
        return []
    own: dict[str, Sequence[int]] = {}
    start = 0
    for column in schema.columns:
        own[column.name] = range(start, start + column.width)
        start += column.width
    found: list[tuple[str, Array, bool, Sequence[int]]] = []
    for name in map(str, frame.columns):
        values = pick(frame, name)
        if name == schema.target:
            continue
        layout = layout_of(values)
        if layout not in (None, UNCLEAR) and not values.isna().any():
            found.append((name, np.unique(times_of(values), return_inverse=True)[1], True, ()))
        elif layout is None and may_hold_groups(values):
            text = own.get(name, ()) if is_text(values) else ()
            found.append((name, np.unique(groups_of(values), return_inverse=True)[1], False, text))
    if not found:
        return []
    # imported here: most tables have no such column
    from doxa.driver.leakage import Column, find_leaks

    columns = [
        Column(name, torch.as_tensor(value), ordered, torch.as_tensor(
            [i for i in range(x.shape[1]) if i not in without], dtype=torch.long
        ))
        for name, value, ordered, without in found
    ]  # fmt: skip
    likelihood = assumed(schema.likelihood) if schema.assumed else likelihood_of(schema.likelihood)
    leaks = find_leaks(torch.as_tensor(x), torch.as_tensor(y), likelihood, columns, seed)
    return [
        {"column": leak.name, "option": "--time" if leak.ordered else "--group",
         "loss": leak.loss, "error": leak.error, "model": leak.model}
        for leak in leaks
    ]  # fmt: skip


def leak_words(leak: dict[str, Any]) -> str:
    """The message about a column that leaks."""
    name, time = repr(leak["column"]), leak["option"] == "--time"
    near = f"rows of times near theirs in {name}" if time else f"other rows of their {name}"
    new = "later rows" if time else f"a new {name}"
    return (
        f"rows belong together by column {name}: held-out rows are predicted "
        f"{leak['loss']:.2f} ± {leak['error']:.2f} nats per row better ({leak['model']}) if {near} "
        f"are trained on, so status and scores do not hold for {new}; use {leak['option']} "
        f"{leak['column']} if the fit is for {new}"
    )
