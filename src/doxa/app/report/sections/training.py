"""Training curves: what the driver recorded, one chart a quantity.

Losses and densities are in nats a row and in units of y, as the scores are: the fit's own are of
standardised targets, which differ by the logarithm of their scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from doxa.app.report.charts import Axis, Line, Plot, Points, Ribbon, figure
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
    "loss": "What training lowers: of the likelihood and the prior together.",
    "validation": "Log likelihood of the rows held out, which training should raise.",
    "log_density": "Log joint density along the chains: level and wandering is what to look for.",
    "accept": "Share of proposals accepted; near the target is right.",
    "step": "Step size of the sampler, adapted during burn-in and then kept.",
    "elbo": "Evidence lower bound, which training raises.",
}
TITLES = {"step": "step size", "accept": "acceptance", "validation": "held-out log likelihood"}
NATS = {"loss": 1.0, "validation": -1.0, "log_density": -1.0, "elbo": -1.0}  # sign of log scale


def training(subject: Subject) -> Section:
    found = in_units_of_y(subject.posterior, series(subject.posterior.history))
    if not found:
        text = "The method has no iterations to follow: its answer is computed in one pass."
        return Section("training", "Training", tag("p", None, text))
    kept = _kept(subject.posterior)
    charts = [
        _curve(name, steps, values, kept) for name, (steps, values) in found.items() if values.size
    ]
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


def in_units_of_y(
    posterior: Any, found: dict[str, tuple[Array, Array]]
) -> dict[str, tuple[Array, Array]]:
    """Sums over rows become means, and nats those of y in its own units."""
    scale = posterior.scales.y_scale
    shift = 0.0 if scale is None else float(scale.detach().double().log().sum())
    stopping = posterior.diagnostics.get("stopping", {})
    rows = {"validation": stopping.get("rows"), "log_density": posterior.diagnostics.get("rows")}
    changed = {}
    for name, (steps, values) in found.items():
        number = np.asarray(rows.get(name) or 1.0, float)
        if name in NATS:
            values = values / number + NATS[name] * shift
        changed[name] = steps, values
    return changed


def _kept(posterior: Any) -> Array | None:
    """[members]: the step each of them was kept at, where it is not the last."""
    steps = posterior.diagnostics.get("stopping", {}).get("kept_step")
    return None if steps is None else np.asarray(steps, float)


def _numeric(value: Any) -> bool:
    try:
        np.asarray(value, float)
    except (TypeError, ValueError):
        return False
    return True


def _curve(name: str, steps: Array, values: Array, kept: Array | None = None) -> Html:
    title = TITLES.get(name, name.replace("_", " "))
    title = title[:1].upper() + title[1:]
    label = f"nats a row{', y in its units' * (name != 'elbo')}" if name in NATS else title.lower()
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
    ended = ""
    if kept is not None and name in ("loss", "validation") and len(kept) == members:
        at = np.abs(steps[:, None] - kept).argmin(axis=0)
        marks.append(Points(kept, drawn[at, np.arange(members)], "two", "kept", 4.0))
        ended = _told(kept)
    first, last = _ends(middle)
    path = f"From {short(first)} to {short(last)}."
    gap = f" {count(broken, 'value')} not finite, shown as gaps." if broken else ""
    plot = Plot(
        f"training-{_slug(name)}",
        title,
        f"{title} against step for {count(members, 'member')}. {path}{gap}{ended}",
        Axis("step"),
        _axis(label, middle, drawn),
        marks,
    )
    clipped = " The first values are above the chart." if plot.y.high is not None else ""
    columns, table = ["step", "median"], [steps, middle]
    if members > 1:
        columns += ["lowest", "highest"]
        table += [_nan(np.nanmin, drawn), _nan(np.nanmax, drawn)]
    words: list[Content] = [KNOWN.get(name, ""), " ", path, gap, clipped, ended]
    return figure(plot, words, values_table(f"{title} by step", columns, table))


def _told(kept: Array) -> str:
    """When the members were at their best, which is where they were kept."""
    low, high = int(kept.min()), int(kept.max())
    when = f"step {low:,}" if low == high else f"steps {low:,} to {high:,}"
    return f" Circles: what was kept, the best on the rows held out ({when})."


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
