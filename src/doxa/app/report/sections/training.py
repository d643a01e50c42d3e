"""Training curves: what the driver recorded, one chart a quantity."""

from __future__ import annotations

from typing import Any

import numpy as np

from doxa.app.report.charts import Axis, Line, Plot, Ribbon, figure
from doxa.app.report.charts.marks import Mark
from doxa.app.report.charts.scales import short
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.page import Section
from doxa.app.report.subject import Array, Subject
from doxa.app.report.tabular import values_table
from doxa.app.report.words import count

WINDOW = 7  # records
MOST_LINES = 12  # more members are drawn as their range
KNOWN = {
    "loss": "Loss a row, which training lowers.",
    "validation": "Log likelihood of the validation rows, which training should raise.",
    "log_density": "Log joint density along the chains: level and wandering is what to look for.",
    "accept": "Share of proposals accepted; near the target is right.",
    "step": "Step size of the sampler, adapted during burn-in and then kept.",
    "elbo": "Evidence lower bound, which training raises.",
}
TITLES = {"step": "step size", "accept": "acceptance"}


def training(subject: Subject) -> Section:
    found = series(subject.posterior.history)
    if not found:
        text = "The method has no iterations to follow: its answer is computed in one pass."
        return Section("training", "Training", tag("p", None, text))
    charts = [_curve(name, steps, values) for name, (steps, values) in found.items() if values.size]
    return Section(
        "training", "Training", [_stages(subject), tag("div", {"class": "pair"}, charts)]
    )


def series(history: dict[str, Any]) -> dict[str, tuple[Array, Array]]:
    """{quantity: (steps [T], values [T, members])} of what is recorded as [step, [a member …]]."""
    found = {}
    for name, entries in history.items():
        pairs = [e for e in entries if isinstance(e, (list, tuple)) and len(e) == 2]
        pairs = [(t, np.atleast_1d(np.asarray(v, float)).ravel()) for t, v in pairs if _numeric(v)]
        if not pairs:
            continue
        width = max(len(v) for _, v in pairs)
        pairs = [(t, v) for t, v in pairs if len(v) == width]
        steps = np.array([float(t) for t, _ in pairs])
        found[name] = (steps, np.stack([v for _, v in pairs]))
    return found


def _numeric(value: Any) -> bool:
    try:
        np.asarray(value, float)
    except (TypeError, ValueError):
        return False
    return True


def _curve(name: str, steps: Array, values: Array) -> Html:
    title = TITLES.get(name, name.replace("_", " "))
    title = title[:1].upper() + title[1:]
    members = values.shape[1]
    broken = int((~np.isfinite(values)).sum())
    drawn = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(all="ignore"):
        middle = _nan(np.nanmedian, drawn)
    marks: list[Mark] = []
    if members > MOST_LINES:
        low, high = _nan(np.nanmin, drawn), _nan(np.nanmax, drawn)
        marks.append(Ribbon(steps, low, high, "one", f"range of {members} members"))
    elif members > 1:
        for m in range(members):
            marks.append(Line(steps, drawn[:, m], "thin", "each member" if m == 0 else None))
    smooth = _running(middle)
    if members == 1 and smooth is not middle:
        marks.append(Line(steps, middle, "thin", "each record"))
    calm = "median" if members > 1 else None
    if smooth is not middle:
        calm = f"running median of {WINDOW}"
    marks.append(Line(steps, smooth, "one", calm))
    first, last = _ends(middle)
    path = f"From {short(first)} to {short(last)}."
    gap = f" {count(broken, 'value')} not finite, shown as gaps." if broken else ""
    plot = Plot(
        f"training-{_slug(name)}",
        title,
        f"{title} against step for {count(members, 'member')}. {path}{gap}",
        Axis("step"),
        _axis(title.lower(), middle, drawn),
        marks,
    )
    clipped = " The first values are above the chart." if plot.y.high is not None else ""
    columns, table = ["step", "median"], [steps, middle]
    if members > 1:
        columns += ["lowest", "highest"]
        table += [_nan(np.nanmin, drawn), _nan(np.nanmax, drawn)]
    words: list[Content] = [KNOWN.get(name, ""), " ", path, gap, clipped]
    return figure(plot, words, values_table(f"{title} by step", columns, table))


def _axis(label: str, middle: Array, drawn: Array) -> Axis:
    """From the data, unless a few early values would squash all others."""
    known = drawn[np.isfinite(drawn)]
    if known.size < 20:
        return Axis(label)
    low, high = float(known.min()), float(np.quantile(known, 0.97))
    return Axis(label, high=high + 0.08 * (high - low)) if (
        known.max() - low > 8.0 * (high - low) > 0
    ) else Axis(label)  # fmt: skip


def _stages(subject: Subject) -> Html | None:
    names = subject.posterior.history.get("stage", [])
    steps = [s for s in subject.posterior.history.get("step", []) if isinstance(s, (int, float))]
    if not names or len(set(names)) < 2 or len(steps) != len(names):
        return None
    last = dict(zip(names, steps, strict=True))
    words = ", then ".join(f"{name} (to step {step:,})" for name, step in last.items())
    return tag("p", None, f"Stages: {words}.")


def _nan(reduce: Any, values: Array) -> Array:
    """Over members; NaN where no member has a value, without numpy's warning."""
    some = np.isfinite(values).any(axis=1)
    result = np.full(len(values), np.nan)
    result[some] = reduce(values[some], axis=1)
    return result


def _running(values: Array) -> Array:
    """The median of the neighbours, where there are enough records to be noisy."""
    if len(values) < 4 * WINDOW or not np.isfinite(values).all():
        return values
    half = WINDOW // 2
    inner = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
    edges = [np.median(values[: 2 * k + 1]) for k in range(half)]
    ends = [np.median(values[len(values) - 2 * k - 1 :]) for k in reversed(range(half))]
    return np.concatenate([edges, inner, ends])


def _ends(values: Array) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return (float(known[0]), float(known[-1])) if known.size else (float("nan"),) * 2


def _slug(name: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40]
