"""Text descriptions of results: for the prompt (`repr`) and for notebooks (HTML).

All texts are in this module. A class inherits from `Described`, and its `described` method calls
one of the functions below. They only read attributes, and cost no more than computing moments.
"""

from __future__ import annotations

import html
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from doxa.errors import DoxaError

_MOST = 6  # names, runs or heads per line
# No colours but for the status, on a ground of its own: notebooks have light and dark themes.
_GOOD, _BAD = "#1d6b45", "#a42f3a"
_TABLE = "border-collapse:collapse;font:13px/1.5 sans-serif;text-align:left;margin:.3em 0"
_CELL = "text-align:left;vertical-align:top;padding:1px 1.2em 1px 0;max-width:46em"


@dataclass(frozen=True)
class Words:
    """A title, a status, and facts (name, value)."""

    title: str
    state: str
    facts: Sequence[tuple[str, str]]

    def text(self) -> str:
        width = max((len(name) for name, _ in self.facts), default=0)
        lines = [f"  {name:<{width}}  {value}" for name, value in self.facts]
        head = f"{self.title}: {self.state}" if self.state else self.title
        return "<" + "\n".join([head, *lines]) + ">"

    def html(self) -> str:
        cell = lambda tag, text: f'<{tag} style="{_CELL}">{html.escape(text)}</{tag}>'  # noqa: E731
        rows = [f"<tr>{cell('th', name)}{cell('td', value)}</tr>" for name, value in self.facts]
        if self.state:
            rows.insert(
                0, f'<tr>{cell("th", "status")}<td style="{_CELL}">{self.badge()}</td></tr>'
            )
        title = f"<caption style='{_CELL}'><b>{html.escape(self.title)}</b></caption>"
        return f'<table style="{_TABLE}">{title}{"".join(rows)}</table>'

    def badge(self) -> str:
        """The status as a coloured word, and its reason."""
        word, _, reason = self.state.partition(" ")
        word, colour = word.rstrip(":;,"), _GOOD if word.rstrip(":;,") == "ok" else _BAD
        style = f"background:{colour};color:#fff;border-radius:3px;padding:0 .5em;font-weight:600"
        return f'<span style="{style}">{html.escape(word)}</span> {html.escape(reason)}'.rstrip()


class Described:
    """Base of objects with a text description in a prompt and in a notebook."""

    @abstractmethod
    def described(self) -> Words: ...

    def __repr__(self) -> str:
        return self.described().text()

    def _repr_html_(self) -> str:
        return self.described().html()

    def plot(self, *given: Any, **options: Any) -> Any:
        """Draw the picture that shows this best, on `ax` if it is given, and return the axes.

        A predictive: `doxa.plot.intervals` of numbers, `doxa.plot.decomposition` of classes. Draws:
        `doxa.plot.trace`. A posterior: `doxa.plot.learning_curve`, or `doxa.plot.weights` if
        nothing was trained. Arguments are passed on. It needs the extra `plots`.
        """
        from doxa import plot  # the one import to the right: a result shows itself when asked

        return plot.shown(self)(self, *given, **options)


def posterior(p: Any) -> Words:
    """A posterior of any kind: its form, its status, its data, and its evidence or bound."""
    facts = [("made of", _form(p)), ("task", _task(p))]
    if (inputs := _inputs(p)) is not None:
        facts.append(("inputs", inputs))
    if fitted := _fitted(p.diagnostics):
        facts.append(("fitted to", fitted))
    if held := p.diagnostics.get("held_out"):
        facts.append(("held out", held_out(held)))
    if left := p.diagnostics.get("held_out_calibration"):
        chosen = calibrated_likelihood(left, p.columns)
        facts.append(("likelihood", f"{chosen}, by {plural(left['rows'], 'held-out row')}"))
    has = [
        f"{name} {number(value)}{_error(p, name)}"
        for name in ("log_evidence", "elbo") if (value := getattr(p, name)) is not None
    ]  # fmt: skip
    facts += [("has", ", ".join(has))] if has else []
    return Words(_title(p), state(p.status), facts)


def calibrated_likelihood(found: Any, columns: Sequence[str] | None = None) -> str:
    """What held-out calibration has found. `columns`: the names of the columns of x."""
    text: str = found["likelihood"]
    if "noise_columns" in found:
        each = [
            "the prediction" if k < 0 else columns[k] if columns else f"column {k} of x"
            for k in found["noise_columns"]
        ]
        text += f", whose noise depends on {', '.join(each)}"
    return text


def _error(p: Any, name: str) -> str:
    """The standard error of a number that is estimated from draws, if there is one."""
    error = p.diagnostics.get(f"{name}_error")
    return "" if error is None else f" ± {number(error)}"


def predictive(p: Any) -> Words:
    """A predictive of any form: the number of rows, the likelihood, and the range of moments."""
    heads = p.heads
    if heads == (p,):
        return _one_predictive(p)
    lines = [(f"head {i}", _line(_one_predictive(head))) for i, head in enumerate(heads)]
    return Words(f"Predictive of {len(heads)} heads", "", lines)


def sweep(s: Any) -> Words:
    """A sweep: the number of runs, the settings in which they differ, and counts of statuses."""
    counts = Counter(str(p.status) for p in s)
    statuses = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    splits = len({spec.split for spec in s.specs})
    names = sorted({name for spec in s.specs for name in spec.hyper})
    seeds = len({spec.seed for spec in s.specs})
    facts = [("splits", str(splits))] if splits > 1 else []
    for name in names:
        values = list(dict.fromkeys(repr(spec.hyper.get(name)) for spec in s.specs))
        facts.append((name, _listed(values)))
    facts += [("seeds", str(seeds))] if seeds > 1 else []
    facts += [("runs", "sweep[0] … are posteriors; sweep.select(by=...) finds the best")]
    method = _method(s[0].method) if len(s) else "nothing"
    return Words(f"Sweep of {plural(len(s), 'run')} by {method}", statuses, facts)


def draws(d: Any) -> Words:
    """Draws of MCMC chains from a log density."""
    shapes = [f"{name}{list(shape) if shape else ''}" for name, shape in d.shapes.items()]
    facts = [
        ("made of", f"{plural(d.members, 'chain')} of {plural(d.count, 'draw')}"),
        ("parameters", _listed(shapes)),
    ]
    if d.stats:
        facts.append(("stats", _listed(list(d.stats))))
    if "seconds" in d.diagnostics:
        facts.append(("took", f"{number(d.diagnostics['seconds'])} s"))
    return Words(f"Draws by {_method(d.method)}", state(d.status), facts)


def state(status: Any) -> str:
    """A status with its reason."""
    return f"{status} ({status.reason})" if status.reason else str(status)


def number(value: float) -> str:
    """Three significant digits; thousands as whole numbers with commas."""
    shown = f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"
    return shown.replace("-", "−")


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST]) + (f", … ({len(names)})" if len(names) > _MOST else "")


def _method(method: Any) -> str:
    """A method's name, with the settings that are not its defaults."""
    shown = repr(method)
    name = method.name
    try:
        plain = type(method)().settings()
        own = {key: value for key, value in method.settings().items() if value != plain[key]}
    except (TypeError, AttributeError, ValueError, DoxaError):  # a method defined by the user
        return f"{name}, {shown}"
    settings = ", ".join(f"{key}={value!r}" for key, value in own.items())
    return f"{name} ({settings})" if settings else str(name)


def _title(p: Any) -> str:
    if p.kind == "mixture":
        return f"{type(p).__name__} of {_listed([_method(part.method) for part in p.parts])}"
    through = f" through {type(p.transform).__name__}" if p.kind == "transformed" else ""
    return f"{type(p).__name__} by {_method(p.method)}{through}"


def _form(p: Any) -> str:
    """The numbers of members, draws or parts."""
    if p.kind == "mixture":
        weights = _listed([number(float(w)) for w in p.weights])
        return f"{plural(len(p.parts), 'part')}, weights {weights}"
    if p.kind == "transformed":
        return _form(p.base)
    members = plural(p.members, "member")
    if p.kind != "sample":
        return members
    kept = p.samples.shape[1]
    return f"{members} of {plural(kept, 'draw' if p.chain else 'point')}"


def _task(p: Any) -> str:
    likelihood = p.base_likelihood
    parts = likelihood.heads
    if parts != (likelihood,):
        return f"{len(parts)} heads: {_listed([part.name for part in parts])}"
    kind = "classification" if likelihood.classifies else "regression"
    scaled = p.scales.x_loc is not None or p.scales.y_loc is not None
    return f"{kind}, {likelihood.name}{', standardised inside' if scaled else ''}"


def _inputs(p: Any) -> str | None:
    if p.columns is not None:
        return f"{plural(len(p.columns), 'column')}: {_listed(list(p.columns))}"
    if p.inputs is None:
        return None
    if isinstance(p.inputs, list) and all(isinstance(size, int) for size in p.inputs):
        return plural(p.inputs[0], "column") if len(p.inputs) == 1 else f"of shape {p.inputs}"
    return str(p.inputs)


def _fitted(found: dict[str, Any]) -> str:
    parts = [plural(found["rows"], "row")] if "rows" in found else []
    parts += [f"in {plural(found['steps'], 'step')}"] if found.get("steps") else []
    parts += [f"{number(found['seconds'])} s"] if "seconds" in found else []
    return ", ".join(parts)


_SCORES = {
    "log_prob": "log-likelihood per row", "gain": "gain over a constant",
    "coverage": "share in 90 % intervals", "too_sure": "confidence above accuracy by",
    "groups": "groups",
}  # fmt: skip


def held_out(found: Mapping[str, Any]) -> str:
    """The held-out scores of a fit ± their standard errors, and how they were made."""
    rows = plural(int(found.get("rows", 0)), "row")
    rest = [
        f"{_SCORES.get(name, name)} {_with_error(found, name)}" for name, value in found.items()
        if name not in ("rows", "by", "corrected_for", "cross_fit_parts", "later_rows")
        and not name.endswith("_error")
    ]  # fmt: skip
    made = [how] if (how := estimated_by(found)) else []
    later = ["later than the rows trained on"] if found.get("later_rows") else []
    return ", ".join([rows, *later, *rest, *made])


def _with_error(found: Mapping[str, Any], name: str) -> str:
    """A held-out score ± its standard error, if there is one."""
    error = found.get(f"{name}_error")
    return number(found[name]) + ("" if error is None else f" ± {number(error)}")


def estimated_by(found: Mapping[str, Any]) -> str:
    """How held-out scores were made; empty for a fit of an earlier version."""
    if "by" not in found:
        return ""
    parts = found.get("cross_fit_parts")
    by = found["by"] + (f" in {parts} parts" if parts else "")
    count = found.get("corrected_for", 0)
    return f"by {by}" + (f", corrected for {plural(count, 'chosen number')}" if count else "")


def _one_predictive(p: Any) -> Words:
    mean: Tensor = p.mean
    rows, event, name = mean.shape[0], list(mean.shape[1:]), p.likelihood.name
    moments = p.form.only_moments
    parts = ", mutual_information" if p.splits else ""
    has = f"probs, entropy{parts}, prediction_set"
    if not p.likelihood.classifies:
        facts = [("mean", _range(mean)), ("std", _range(p.std))]
        has = "mean, std, aleatoric, epistemic" + (", moment_matched" if moments else ", interval")
    elif p.likelihood.class_axis:
        name, event = f"{name}, {plural(event[0], 'class', 'classes')}", event[1:]
        facts = [("likeliest", _range(mean.amax(1)))]
    else:
        facts = [("P(y = 1)", _range(mean))]
    has += "" if moments else ", log_prob"
    made = "moments only" if moments else _components(p)
    facts = [("made of", made), *facts] if made else facts
    shape = f", y of shape {event}" if event else ""
    title = f"Predictive at {plural(rows, 'row')}: {name}{shape}"
    return Words(title, "", [*facts, ("has", has)])


def _components(p: Any) -> str:
    try:
        return plural(len(p.weights), "component")
    except AttributeError:  # corrected predictions have no components
        return ""


def _line(text: Words) -> str:
    return "; ".join([text.title, *(f"{name} {value}" for name, value in text.facts[:-1])])


def _range(values: Tensor) -> str:
    low, high = (float(v) for v in (values.min(), values.max())) if values.numel() else (0.0, 0.0)
    if math.isnan(low) or math.isnan(high):
        return "NaN in places"
    return number(low) if low == high else f"{number(low)} … {number(high)}"
