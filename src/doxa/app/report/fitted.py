"""The sections on the fit: method, model and data, training curves, and how to repeat the fit."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from doxa import describe as facts_of
from doxa import registry
from doxa.app.report import html
from doxa.app.report.charts import Axis, Line, Mark, Plot, Points, Ribbon
from doxa.app.report.html import Content, Wrapped
from doxa.app.report.subject import Array, Subject
from doxa.app.report.text import (
    capitalized,
    count,
    describe,
    describe_network,
    describe_prior,
    duration,
    percent,
    settings,
    short,
)
from doxa.describe import calibrated_likelihood

MOST_COLUMNS = 60
MOST_NOTES = 20
WINDOW = 7  # number of records of a running median
MOST_LINES = 12  # with more members, their range is drawn
RANDOM = {
    "all": "all weights",
    "last_layer": "the last layer; the other weights are point estimates",
}


def fitted_section(subject: Subject) -> Content:
    shown = [part(subject) for part in (_method, _model, _data, _run, _certificate)]
    return [html.cards(*shown), *_leaks(subject), _columns(subject)]


def _leaks(subject: Subject) -> list[Content]:
    """The columns by which rows belong together, as found by `doxa fit`."""
    found = subject.posterior.metadata.get("leakage", ())
    if not found:
        return []
    from doxa.tabular import leak_words  # imported here: most runs have no such column

    lines = [f"{leak_words(leak)}." for leak in found]
    return [html.paragraph(subject.names.show(line[0].upper() + line[1:], 600)) for line in lines]


def _method(subject: Subject) -> Content:
    posterior, name = subject.posterior, subject.method_name
    row = next((row for row in registry.methods() if row.name == name), None)
    transform = posterior.transform
    chosen = [
        (field.replace("_", " "), [describe(value), html.quiet(" (default)") if same else None])
        for field, value, same in settings(posterior.method)
    ]
    pairs: list[tuple[str, Content]] = [
        ("name", name),
        ("what it is", row.summary if row else None),
        ("paper", row.paper if row else None),
        ("members", posterior.members),
        ("correction", None if transform is None else describe(transform)),
    ]
    return html.card("Method", pairs + chosen)


def _certificate(subject: Subject) -> Content:
    """The evaluation that was stored with the run, with which `doxa watch` compares new rows."""
    found = subject.posterior.certificate

    def interval(estimate: Any, show: Any) -> str | None:
        if estimate is None:
            return None
        value, low, high = map(show, estimate)
        return f"{value} ({low} to {high})"

    pairs: list[tuple[str, Content]] = [
        ("evaluated by", found.evaluated_by),
        ("rows", f"{found.rows:,}" if found.rows else None),
        (f"coverage at {percent(found.level)}", interval(found.coverage, percent)),
        ("log likelihood per row", interval(found.log_prob, short)),
        ("gain over a constant", interval(found.gain, short)),
        ("5 % quantile of the scores", None if found.low_score is None else short(found.low_score)),
        ("share of rows below it", interval(found.low_share, percent)),
        ("assumed", f"{found.assumed} rows"),
        ("data", found.data[:16] or None),
        ("doxa, date", f"{found.version}, {found.date}"),
    ]
    return html.card("Certificate", pairs)


def _model(subject: Subject) -> Content:
    posterior, model = subject.posterior, subject.posterior.model
    pairs: list[tuple[str, Content]] = [("likelihood", _likelihood(subject))]
    if model is None:
        pairs += [("network", "none: the method does not use one")]
    else:
        builder = model.builder
        own = f"your own ({type(model.net).__name__})"
        chosen = RANDOM.get(model.subset) if isinstance(model.subset, str) else None
        pairs += [
            ("network", describe_network(builder) if builder else own),
            ("weights", f"{sum(entry.size for entry in model.layout.entries):,} per member"),
            ("prior", describe_prior(model.prior)),
            ("uncertain weights", chosen or "a chosen part of the weights"),
        ]
    kernel = posterior.diagnostics.get("kernel")
    if isinstance(kernel, dict):
        pairs += [(name.replace("_", " "), describe(value)) for name, value in kernel.items()]
    return html.card("Model", pairs)


def _likelihood(subject: Subject) -> str:
    posterior, schema = subject.posterior, subject.schema
    text = describe(posterior.base_likelihood)
    left = posterior.diagnostics.get("held_out_calibration", {})
    if "noise_columns" in left:
        names = schema.input_names if schema else posterior.columns
        text = calibrated_likelihood({**left, "likelihood": text}, names)
    if rows := _chosen_by(posterior):
        return f"{text}, chosen by {rows:,} held-out rows"
    return f"{text}, noise learned" if posterior.base_likelihood.learns_noise else text


def _chosen_by(posterior: Any) -> int | None:
    """The number of held-out rows by which the likelihood was chosen. None if it was not chosen."""
    return posterior.diagnostics.get("held_out_calibration", {}).get("rows")


def _data(subject: Subject) -> Content:
    posterior, schema, names = subject.posterior, subject.schema, subject.names
    source = posterior.metadata.get("source", {})
    scales = (("inputs", posterior.scales.x_loc), ("target", posterior.scales.y_loc))
    standardised = " and ".join(what for what, value in scales if value is not None)
    inputs = classes = None
    if schema is not None:
        inputs = f"{count(len(schema.columns), 'column')}, {count(schema.inputs, 'number')} per row"
    elif posterior.inputs is not None:
        inputs = f"shape {describe(posterior.inputs)} per row"
    if subject.classes:
        classes = [f"{len(subject.classes)}: ", names.listed(subject.classes)]
    return html.card(
        "Data",
        [
            ("file", names.show(source["file"]) if source.get("file") else None),
            ("checksum", f"SHA-256 {source['sha256'][:16]}…" if source.get("sha256") else None),
            ("rows fitted", posterior.diagnostics.get("rows") or source.get("rows")),
            ("target", names.show(subject.target)),
            ("classes", classes),
            ("inputs", inputs),
            ("standardised", standardised or "no"),
        ],
    )


def _run(subject: Subject) -> Content:
    posterior, record = subject.posterior, subject.posterior.diagnostics
    engine, mode, reason = (record.get(k) for k in ("engine", "mode", "engine_reason"))
    how = None
    if engine:
        how = (f"{engine}, {mode}" if mode else str(engine)) + (f" ({reason})" if reason else "")
    seconds = record.get("seconds")
    return html.card(
        "Run",
        [
            ("time", duration(seconds) if isinstance(seconds, (int, float)) else None),
            ("steps", record.get("steps")),
            ("engine", how),
            ("seed", str(posterior.record.seed)),
            ("precision", str(posterior.dtype).removeprefix("torch.")),
            ("log evidence", _number(posterior.log_evidence)),
            ("ELBO", _number(posterior.elbo)),
            ("held-out score", _held_out_score(posterior)),
            ("versions", _versions(posterior) or None),
        ],
    )


def _held_out_score(posterior: Any) -> str | None:
    """The estimated score of new rows ± its standard error, and how it was estimated."""
    if posterior.validation is None:
        return None
    found = posterior.diagnostics.get("held_out") or {}
    shown = short(float(posterior.validation), 5)
    if "log_prob_error" in found:
        shown += f" ± {short(found['log_prob_error'], 2)}"
    made = facts_of.estimated_by(found)
    return f"{shown} mean log predictive" + (f" ({made})" if made else "")


def _number(value: Any, unit: str = "") -> str | None:
    return None if value is None else short(float(value), 5) + unit


def _versions(posterior: Any) -> str:
    versions = posterior.metadata.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _columns(subject: Subject) -> Content:
    """How each column was read, in a collapsed element."""
    inputs, names = subject.inputs, subject.names
    if not inputs:
        return None
    rows: list[list[Content]] = []
    for column in inputs[:MOST_COLUMNS]:
        kind: Content = "number"
        if column.categories is not None:
            many = count(len(column.categories), "category", "categories")
            kind = [f"{many}: ", names.listed(column.categories)]
        rows.append([names.show(column.name), Wrapped(kind)])
    some = f" ({len(rows)} of {len(inputs)})" if len(inputs) > len(rows) else ""
    title = f"Input columns{some} and how they were read"
    notes = () if subject.schema is None else subject.schema.notes
    shown = html.items([names.show(note, 200) for note in notes[:MOST_NOTES]])
    return html.disclosure(title, html.table(title, ["column", "read as"], rows, quiet=True), shown)


# The quantities that the driver records: title, explanation, and the sign with which log scale(y)
# enters them, which is 0 for quantities that are not in nats. Losses and densities are shown in
# nats per row and in units of y, as the scores are. Those of the fit are of standardised targets,
# and differ by the logarithm of the scale.
SERIES = {
    "loss": ("loss", "The training loss, of the likelihood and the prior together.", 1),
    "validation": ("held-out log likelihood",
                   "Log likelihood of held-out rows. It should increase during training.", -1),
    "log_density": ("log density",
                    "Log joint density along the chains: it should be stationary, without a trend.",
                    -1),
    "accept": ("acceptance", "Share of proposals accepted; it should be near the target.", 0),
    "step": ("step size", "Step size of the sampler, adapted during burn-in and then kept.", 0),
    "elbo": ("ELBO", "Evidence lower bound. Training increases it.", -1),
}  # fmt: skip


def training_section(subject: Subject) -> Content:
    """The recorded history of the fit, with one chart per quantity."""
    found = in_units_of_y(subject.posterior, series(subject.posterior.history))
    if not found:
        return html.paragraph(
            "The method has no iterations: the posterior is computed in one pass."
        )
    steps = subject.posterior.diagnostics.get("stopping", {}).get("kept_step")
    kept = None if steps is None else np.asarray(steps, float)
    charts = [_curve(name, *each, kept) for name, each in found.items() if each[1].size]
    return [_stages(subject), html.pair(charts)]


def series(history: dict[str, Any]) -> dict[str, tuple[Array, Array]]:
    """{quantity: (steps [T], values [T, members])} from records [step, [values]]."""
    found = {}
    for name, entries in history.items():
        pairs = [e for e in entries if isinstance(e, (list, tuple)) and len(e) == 2]
        pairs = [(t, np.atleast_1d(np.asarray(v, float)).ravel()) for t, v in pairs if _numeric(v)]
        if not pairs:
            continue
        width = max(len(v) for _, v in pairs)
        pairs = [(t, v) for t, v in pairs if len(v) == width]
        found[name] = np.array([float(t) for t, _ in pairs]), np.stack([v for _, v in pairs])
    return found


def _numeric(value: Any) -> bool:
    try:
        np.asarray(value, float)
    except (TypeError, ValueError):
        return False
    return True


def in_units_of_y(
    posterior: Any, found: dict[str, tuple[Array, Array]]
) -> dict[str, tuple[Array, Array]]:
    """Convert sums over rows to means, and densities to the units of y."""
    scale, record = posterior.scales.y_scale, posterior.diagnostics
    shift = 0.0 if scale is None else float(scale.detach().double().log().sum())
    rows = {"validation": record.get("stopping", {}).get("rows"), "log_density": record.get("rows")}
    changed = {}
    for name, (steps, values) in found.items():
        if sign := SERIES.get(name, ("", "", 0))[2]:
            values = values / np.asarray(rows.get(name) or 1.0, float) + sign * shift
        changed[name] = steps, values
    return changed


def _curve(name: str, steps: Array, values: Array, kept: Array | None) -> Content:
    title, about, sign = SERIES.get(name, (name.replace("_", " "), "", 0))
    label = f"nats per row{', in units of y' * (name != 'elbo')}" if sign else title
    title = capitalized(title)
    members = values.shape[1]
    broken = int((~np.isfinite(values)).sum())
    drawn = np.where(np.isfinite(values), values, np.nan)
    middle, low, high = (_over(f, drawn) for f in (np.nanmedian, np.nanmin, np.nanmax))
    marks: list[Mark] = []
    if members > MOST_LINES:
        marks.append(Ribbon(steps, low, high, "one", f"range of {members} members"))
    elif members > 1:
        for m in range(members):
            marks.append(Line(steps, drawn[:, m], "thin", "each member" if m == 0 else None))
    smooth, calm = _running(middle), "median" if members > 1 else None
    if smooth is not middle:
        calm = f"running median of {WINDOW}"
        if members == 1:
            marks.append(Line(steps, middle, "thin", "each record"))
    marks.append(Line(steps, smooth, "one", calm))
    ended = ""
    if kept is not None and name in ("loss", "validation") and len(kept) == members:
        at = np.abs(steps[:, None] - kept).argmin(axis=0)
        marks.append(Points(kept, drawn[at, np.arange(members)], "two", "kept", 4.0))
        first, last = int(kept.min()), int(kept.max())
        when = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        ended = f" Circles mark what was kept: the best on the held-out rows ({when})."
    known = middle[np.isfinite(middle)]
    ends = (float(known[0]), float(known[-1])) if known.size else (float("nan"),) * 2
    path = f"It goes from {short(ends[0])} to {short(ends[1])}."
    gap = f" Gaps mark values that are not finite ({broken:,})." if broken else ""
    key = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40]
    plot = Plot(
        f"training-{key}",
        title,
        f"{title} against step for {count(members, 'member')}. {path}{gap}{ended}",
        Axis("step"),
        _axis(label, drawn),
        marks,
    )
    clipped = " The first values are too large for the chart." if plot.y.high is not None else ""
    shown = [("step", steps), ("median", middle)]
    shown += [("lowest", low), ("highest", high)] if members > 1 else []
    return html.figure(plot, f"{about} {path}{gap}{clipped}{ended}", shown)


def _axis(label: str, drawn: Array) -> Axis:
    """An axis with limits from the data. A few large early values are left outside, because they
    would compress the others."""
    known = drawn[np.isfinite(drawn)]
    if known.size < 20:
        return Axis(label)
    low, high = float(known.min()), float(np.quantile(known, 0.97))
    squashed = known.max() - low > 8.0 * (high - low) > 0
    return Axis(label, high=high + 0.08 * (high - low) if squashed else None)


def _stages(subject: Subject) -> Content:
    names = subject.posterior.history.get("stage", [])
    steps = [s for s in subject.posterior.history.get("step", []) if isinstance(s, (int, float))]
    if not names or len(set(names)) < 2 or len(steps) != len(names):
        return None
    last = dict(zip(names, steps, strict=True))
    stages = ", then ".join(f"{name} (to step {step:,})" for name, step in last.items())
    return html.paragraph(f"Stages: {stages}.")


def _over(reduce: Any, values: Array) -> Array:
    """Reduce values over members. The result is NaN where no member has a value, and numpy's
    warning is suppressed."""
    some = np.isfinite(values).any(axis=1)
    result = np.full(len(values), np.nan)
    result[some] = reduce(values[some], axis=1)
    return result


def _running(values: Array) -> Array:
    """The running median, if there are many records, which are then noisy."""
    if len(values) < 4 * WINDOW or not np.isfinite(values).all():
        return values
    half = WINDOW // 2
    inner = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
    edges = [np.median(values[: 2 * k + 1]) for k in range(half)]
    ends = [np.median(values[len(values) - 2 * k - 1 :]) for k in reversed(range(half))]
    return np.concatenate([edges, inner, ends])


PLAN = ("net", "members", "epochs", "steps", "lr", "batch_size", "validation", "device")
HELD_OUT = ("test", "split", "calibrate", "conformal", "conformal_kind", "calibration_share")


def recipe_section(subject: Subject) -> Content:
    """How to repeat the fit: the command, the Python code, the seed and the versions."""
    posterior, parts = subject.posterior, []
    source = posterior.metadata.get("source", {})
    line = command(subject)
    if line is not None:
        parts += [html.heading("Command line"), html.code_block("the command that fitted it", line)]
    parts += [html.heading("Python"), html.code_block("Python that fits it", snippet(subject))]
    parts.append(html.paragraph(
        f"Seed {posterior.record.seed}. The same seed, machine and engine give the same numbers, "
        "bit for bit. On another machine they differ by rounding errors, which grow in long "
        "training."
    ))  # fmt: skip
    if versions := _versions(posterior):
        parts.append(html.paragraph(f"Fitted with {versions}."))
    if source.get("sha256"):
        file = subject.names.show(source.get("file", ""))
        parts.append(
            html.paragraph("Training file ", file, ", SHA-256 ", html.code(source["sha256"]), ".")
        )
    return parts


def command(subject: Subject) -> str | None:
    """The `doxa fit` command of the fit. None if the posterior was not fitted by this command."""
    metadata, schema = subject.posterior.metadata, subject.schema
    if schema is None or "method" not in metadata:
        return None
    asked = metadata.get("asked", {})
    source = metadata.get("source", {})
    args = ["doxa", "fit", source.get("file") or "DATA.csv", "--target", schema.target]
    args += ["--method", metadata["method"]]
    likelihood = asked.get("likelihood", None if schema.assumed else schema.likelihood)
    args += ["--likelihood", likelihood] if likelihood else []
    index = asked.get("index") if "index" in asked else schema.index
    args += ["--index", index] if index else []
    for option in ("drop", "categorical", "numeric"):
        for name in asked.get(option, ()):
            args += [f"--{option}", name]
    for option in ("group", "time"):
        args += [f"--{option}", asked[option]] if asked.get(option) else []
    args += ["--time-input"] if asked.get("time_input") else []
    args += ["--missing", schema.missing] if schema.missing != "error" else []
    for option in ("sep", "decimal", "encoding"):
        args += [f"--{option}", asked[option]] if asked.get(option) else []
    for name, value, same in settings(subject.posterior.method):
        args += [] if same else ["--set", f"{name}={value!r}".replace("'", "")]
    if asked.get("hidden") and not asked.get("net") and subject.posterior.model is not None:
        args += ["--hidden", ",".join(map(str, asked["hidden"]))]
    for option in (*PLAN, *HELD_OUT):
        if asked.get(option) is not None:
            args += [f"--{option.replace('_', '-')}", str(asked[option])]
    args += ["--seed", str(subject.posterior.record.seed)]
    args += ["--out", subject.folder or "run"]
    return " ".join(shlex.quote(str(word)) for word in args)


def snippet(subject: Subject) -> str:
    """Python code that repeats the fit. Parts that are not known are comments."""
    posterior, schema, model = subject.posterior, subject.schema, subject.posterior.model
    asked = posterior.metadata.get("asked", {})
    lines = ["import doxa"]
    if schema is not None:
        lines += _reading(subject, asked)
    else:
        lines += ["", "x, y = ...  # the training rows"]
    lines += [f"net = {_net(posterior)}"]
    # A likelihood that was inferred is not an argument here either; a comment names it.
    given = posterior.fitted_likelihood
    inferred = given.assumed
    options = [] if inferred else [f"likelihood={_class(given)}"]
    if model is not None and model.prior is not None and not asked:
        options.append(f"prior={_class(model.prior)}")
    options.append(f"seed={posterior.record.seed}")
    if posterior.scales.x_loc is not None or posterior.scales.y_loc is not None:
        options.append("standardize=True")
    plan = {name: asked[name] for name in PLAN if asked.get(name) is not None and name != "net"}
    if not plan.get("validation"):  # on the command line 0 means no validation
        plan.pop("validation", None)
    options += [f"{name}={value!r}" for name, value in plan.items()]
    if schema is not None and _together(schema):
        options.append("**together.options()")
    if "members" not in asked and posterior.members > 1 and posterior.kind != "mixture":
        options.append(f"members={posterior.members}")
    lines += [
        f"method = {_class(posterior.method)}",
        "posterior = doxa.fit(",
        "    net, (x, y), method,",
        f"    {', '.join(options)},",
        ")",
    ]
    rows = _chosen_by(posterior)
    if inferred or rows:
        by = f", chosen by {rows:,} held-out rows" if rows else ""
        lines.append(f"# its likelihood: {describe(posterior.base_likelihood)}{by}")
    if posterior.transform is not None:
        lines.append(f"# then recalibrated: {type(posterior.transform).__name__}")
    return "\n".join(lines)


def _reading(subject: Subject, asked: dict[str, Any]) -> list[str]:
    """Python code that reads the table of a run."""
    schema = subject.schema
    assert schema is not None
    file = subject.posterior.metadata.get("source", {}).get("file") or "DATA.csv"
    options = [] if schema.assumed else [f"likelihood={schema.likelihood!r}"]
    lists = ("drop", "categorical", "numeric")
    options += [f"{o}={tuple(asked[o])!r}" for o in lists if asked.get(o)]
    ones = ("group", "time", "time_input")
    options += [f"{o}={asked[o]!r}" for o in ones if asked.get(o)]
    options += [f"index={schema.index!r}"] if schema.index else []
    options += [f"missing={schema.missing!r}"] if schema.missing != "error" else []
    given = {o: asked[o] for o in ("sep", "decimal", "encoding") if asked.get(o)}
    written = ", ".join(f"{name}={value!r}" for name, value in given.items())
    options += [f"dialect=schema.Dialect({written})"] if written else []
    return [
        "from pathlib import Path",
        "from doxa.tables import schema", "",
        f"asked = schema.TableSpec({', '.join([repr(schema.target), *options])})",
        f"frame, columns = schema.read_dataset(Path({file!r}), asked)",
        "x, y = columns.features(frame)[0], columns.targets(frame)",
        *_together(schema),
    ]  # fmt: skip


def _together(schema: Any) -> list[str]:
    """Python code that reads the groups and times of the rows."""
    if schema.group is None and schema.time is None:
        return []
    return [
        "from doxa.tables.schema import Together",
        "together = Together.of(frame, columns)  # the groups and times of the rows",
    ]


def _net(posterior: Any) -> str:
    model = posterior.model
    if model is None:
        return "None  # the method does not use a network"
    builder = model.builder
    if builder is None:
        return f"...  # your own {type(model.net).__name__}"
    name, options = builder
    return f"doxa.nets.build({name!r}, {options!r})"


def _class(value: Any) -> str:
    """Python code that makes an object of a public class, with the settings that are not
    defaults."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_class(v)}" for k, v in value.items()) + "}"
    changed = [f"{name}={each!r}" for name, each, same in settings(value) if not same]
    return f"doxa.{type(value).__name__}({', '.join(changed)})"
