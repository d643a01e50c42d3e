"""What was fitted and how: method, network, likelihood, prior, data, run, versions."""

from __future__ import annotations

from typing import Any

from doxa import registry
from doxa.app.report.charts.scales import short
from doxa.app.report.describe import describe, network, prior, settings
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.names import Names
from doxa.app.report.page import Section
from doxa.app.report.subject import Subject
from doxa.app.report.tabular import Words, card, table
from doxa.app.report.words import count, duration

MOST_COLUMNS = 60
MOST_NOTES = 20


def fitted(subject: Subject) -> Section:
    cards = [_method(subject), _model(subject), _data(subject), _run(subject)]
    parts: list[Content] = [tag("div", {"class": "facts"}, cards), _columns(subject)]
    return Section("fitted", "What was fitted", parts)


def method_row(posterior: Any) -> registry.Row | None:
    """The method's line in the table of methods; None for one that is not registered."""
    name = getattr(posterior.method, "name", None)
    return next((row for row in registry.methods() if row.name == name), None)


def method_name(posterior: Any) -> str:
    return str(getattr(posterior.method, "name", type(posterior.method).__name__))


def _method(subject: Subject) -> Html:
    posterior = subject.posterior
    row = method_row(posterior)
    chosen = [
        (name.replace("_", " "), join_default(value, same))
        for name, value, same in settings(posterior.method)
    ]
    transform = getattr(posterior, "transform", None)
    return card(
        "Method",
        [
            ("name", method_name(posterior)),
            ("what it is", row.summary if row else None),
            ("paper", row.paper if row else None),
            ("members", posterior.members),
            ("afterwards", None if transform is None else describe(transform)),
            *chosen,
        ],
    )


def join_default(value: Any, same: bool) -> Content:
    return [describe(value), tag("span", {"class": "quiet"}, " (default)") if same else None]


def _model(subject: Subject) -> Html:
    posterior = subject.posterior
    model = posterior.model
    pairs: list[tuple[str, Content]] = [("likelihood", _likelihood(posterior))]
    if model is None:
        pairs += [("network", "none: the method brings its own functions")]
    else:
        builder = getattr(model, "builder", None)
        own = type(model.net).__name__
        pairs += [
            ("network", network(builder) if builder else f"your own ({own})"),
            ("weights", _weights(model)),
            ("prior", prior(model.prior)),
            ("what is random", _subset(model.subset)),
        ]
    kernel = posterior.diagnostics.get("kernel")
    if isinstance(kernel, dict):
        pairs += [(name.replace("_", " "), describe(value)) for name, value in kernel.items()]
    return card("Model", pairs)


def _data(subject: Subject) -> Html:
    posterior, schema = subject.posterior, subject.schema
    source = posterior.metadata.get("source", {})
    rows = posterior.diagnostics.get("rows") or source.get("rows")
    classes = subject.classes
    scales = posterior.scales
    standard = [
        what
        for what, value in (("inputs", scales.x_loc), ("target", scales.y_loc))
        if value is not None
    ]
    names = subject.names
    inputs = None
    if schema is not None:
        inputs = f"{count(len(schema.columns), 'column')}, {count(schema.inputs, 'number')} a row"
    elif posterior.inputs is not None:
        inputs = f"shape {describe(posterior.inputs)} a row"
    shown = None
    if classes:
        shown = [f"{len(classes)}: ", _listed(names, classes)]
    return card(
        "Data",
        [
            ("file", names.show(source["file"]) if source.get("file") else None),
            ("checksum", f"SHA-256 {source['sha256'][:16]}…" if source.get("sha256") else None),
            ("rows fitted", rows),
            ("target", names.show(subject.target)),
            ("classes", shown),
            ("inputs", inputs),
            ("standardised", " and ".join(standard) or "no"),
        ],
    )


def _run(subject: Subject) -> Html:
    posterior = subject.posterior
    record = posterior.diagnostics
    versions = posterior.metadata.get("versions", {})
    engine = record.get("engine")
    reason = record.get("engine_reason")
    mode = record.get("mode")
    how = None
    if engine:
        how = f"{engine}, {mode}" if mode else str(engine)
        how += f" ({reason})" if reason else ""
    seconds = record.get("seconds")
    return card(
        "Run",
        [
            ("time", duration(seconds) if isinstance(seconds, (int, float)) else None),
            ("steps", record.get("steps")),
            ("engine", how),
            ("seed", str(posterior.record.seed)),
            ("precision", str(posterior.dtype).removeprefix("torch.")),
            ("log evidence", _number(posterior.log_evidence)),
            ("ELBO", _number(posterior.elbo)),
            ("validation", _number(posterior.validation, " mean log predictive")),
            ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()) or None),
        ],
    )


def _columns(subject: Subject) -> Html | None:
    """How each column was read, behind a disclosure."""
    inputs, names = subject.inputs, subject.names
    if not inputs:
        return None
    rows: list[list[Content]] = []
    for column in inputs[:MOST_COLUMNS]:
        kind: Content = "number"
        if column.categories is not None:
            many = count(len(column.categories), "category", "categories")
            kind = [f"{many}: ", _listed(names, column.categories)]
        rows.append([names.show(column.name), Words(kind)])
    some = f" ({len(rows)} of {len(inputs)})" if len(inputs) > len(rows) else ""
    title = f"Input columns{some} and how they were read"
    notes = () if subject.schema is None else subject.schema.notes
    left_out = [tag("li", None, names.show(note, 200)) for note in notes if "left out" in note]
    return tag(
        "details",
        None,
        tag("summary", None, title),
        table(title, ["column", "read as"], rows, quiet=True),
        tag("ul", None, left_out[:MOST_NOTES]) if left_out else None,
    )


def _listed(names: Names, things: Any, most: int = 8) -> Content:
    parts: list[Content] = []
    for k, thing in enumerate(things[:most]):
        parts += [", " if k else None, names.show(thing)]
    if len(things) > most:
        parts.append(f" and {len(things) - most} more")
    return parts


def _likelihood(posterior: Any) -> str:
    said = describe(posterior.base_likelihood)
    if left_out := posterior.diagnostics.get("left_out"):
        return f"{said}, by {left_out['rows']:,} rows left out"
    learned = getattr(posterior.base_likelihood, "noise", 0.0) is None
    return f"{said}, noise learned" if learned else said


def _weights(model: Any) -> str:
    total = sum(entry.size for entry in model.layout.entries)
    return f"{total:,} a member"


def _subset(subset: Any) -> str:
    words = {"all": "all weights", "last_layer": "the last layer; the rest is a point"}
    return words.get(subset, "a chosen part of the weights") if isinstance(subset, str) else (
        "a chosen part of the weights"
    )  # fmt: skip


def _number(value: Any, unit: str = "") -> str | None:
    return None if value is None else short(float(value), 5) + unit
