"""Pictures of fits: functions, weights, training and active learning, information gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from doxa.errors import DataError, MethodError, Unavailable
from doxa.plot.style import (
    ALEATORIC,
    DASHES,
    FAINT,
    INK,
    MEAN,
    SERIES,
    axes,
    bands,
    curves,
    flat,
    legend,
)  # fmt: skip
from doxa.posterior import Posterior


def functions(
    posterior: Posterior,
    x: Any,
    *,
    data: tuple[Any, Any] | None = None,
    n: int = 12,
    ax: Any = None,
) -> Any:
    """The posterior over functions of one input: the mean, two bands and some draws.

    Parameters
    ----------
    posterior : Posterior
        Of a regression with one input and one output.
    x : array_like
        The inputs of the line, [G] or [G, 1], in any order.
    data : tuple (x, y), optional
        Points to show.
    n : int, default 12
        The number of functions, fewer if fewer were kept.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        The outer band is where new data should lie, the inner one where the function should.

    Examples
    --------
    >>> doxa.plot.functions(posterior, np.linspace(-3, 3, 200), data=(x, y))
    """
    if not isinstance(posterior, Posterior):
        raise DataError(f"functions are of a posterior, not of {type(posterior).__name__}")
    line = np.sort(flat(x))
    p = posterior.predict(line[:, None])
    if p.likelihood.classifies or p.mean.numel() != len(line):
        raise MethodError("functions are drawn for a regression with one input and one output")
    ax = axes(ax, f"{posterior.method.name}: {posterior.status}", "x", "y")
    bands(ax, line, flat(p.mean), flat(p.aleatoric), flat(p.epistemic))
    try:
        drawn = posterior.functions(line[:, None], n)
    except MethodError:  # fewer were kept
        drawn = posterior.functions(line[:, None], posterior.members)
    curves(ax, line, drawn.detach().cpu().double().numpy().reshape(len(drawn), -1))
    ax.plot(line, flat(p.mean), color=MEAN, lw=2.0, label="mean", zorder=5)
    if data is not None:
        ax.plot(*map(flat, data), ".", color=INK, ms=4, alpha=0.75, label="data", zorder=6)
    ax.set_xlim(line[0], line[-1])
    legend(ax, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return ax


def learning_curve(source: Any, *, metric: str | None = None, ax: Any = None) -> Any:
    """How training or active learning went.

    Parameters
    ----------
    source : Posterior, Learned or Mapping
        A posterior: its loss and its held-out score by step. The result of
        `doxa.decide.active.learn`: a score by the number of labels, for each way to choose rows. A
        mapping {name: [(x, y), …]}: these curves.
    metric : str, optional
        For `Learned`: the score. Default: the first one.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        One line for each curve; members of a posterior are averaged, with their range as a band.
    """
    if isinstance(source, Posterior):
        return _training(source, ax)
    if isinstance(source, Mapping):
        ax = axes(ax, "learning curves", "", "")
        for k, (name, points) in enumerate(source.items()):
            ax.plot(*zip(*points, strict=True), color=SERIES[k % 4], ls=DASHES[k % 4], label=name)
        legend(ax)
        return ax
    learners = getattr(source, "learners", None)
    if not learners:
        raise DataError(f"a learning curve is of a posterior or of active.learn, not of "
                        f"{type(source).__name__}")  # fmt: skip
    known = [name for name in learners[0].curve[0] if name != "labels"]
    if not known:
        raise Unavailable("these runs were not scored: pass test= to learn")
    chosen = metric or known[0]
    ax = axes(ax, "active learning", "labels", chosen)
    for k, by in enumerate(dict.fromkeys(one.by for one in learners)):
        at, mean, std = (np.asarray(v) for v in zip(*source.mean_curve(by, chosen), strict=True))
        ax.fill_between(at, mean - std, mean + std, color=SERIES[k % 4], alpha=0.15, lw=0)
        ax.plot(at, mean, color=SERIES[k % 4], ls=DASHES[k % 4], label=by)
    legend(ax)
    return ax


def _training(posterior: Posterior, ax: Any) -> Any:
    history = posterior.history
    curves_of = {
        "loss": "loss on training rows, per row", "validation": "log-likelihood on held-out rows",
    }  # fmt: skip
    kept = {name: history[name] for name in curves_of if history.get(name)}
    if not kept:
        raise Unavailable(f"{posterior.method.name} has recorded no loss: nothing was trained")
    ax = axes(ax, f"{posterior.method.name}: {posterior.status}", "step", "")
    panels = [ax, ax.twinx()] if len(kept) == 2 else [ax]
    for k, (panel, (name, points)) in enumerate(zip(panels, kept.items(), strict=True)):
        at = np.array([step for step, _ in points], dtype=float)
        values = np.array([np.atleast_1d(value) for _, value in points], dtype=float)
        label = curves_of[name]
        low, high = values.min(1), values.max(1)
        panel.fill_between(at, low, high, color=SERIES[k], alpha=0.15, lw=0)
        panel.plot(at, values.mean(1), color=SERIES[k], ls=DASHES[k], label=label)
        panel.set_ylabel(label, color=SERIES[k])
    if len(panels) == 2:
        for side in panels[1].spines.values():
            side.set_visible(False)
        panels[1].tick_params(colors=FAINT, labelsize=9, length=3)
    return ax


def eig(source: Any, *, ax: Any = None) -> Any:
    """The expected information gain of designs, and the best one.

    Parameters
    ----------
    source : EIG or Study
        The result of `doxa.decide.eig`, or a study, whose gains are computed now. Designs of one
        number are on a line; others are numbered.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        The gains with twice their standard errors, in nats.
    """
    found = source.gains() if hasattr(source, "gains") else source
    if not hasattr(found, "values") or not hasattr(found, "designs"):
        raise DataError(f"a gain is of doxa.decide.eig or a Study, not of {type(source).__name__}")
    gains, errors = flat(found.values), flat(found.errors)
    designs = found.designs.detach().cpu().double().reshape(len(gains), -1).numpy()
    single = designs.shape[1] == 1
    at = designs[:, 0] if single else np.arange(len(gains), dtype=float)
    order, best = np.argsort(at, kind="stable"), int(gains.argmax())
    title = f"expected information gain ({found.kind})"
    ax = axes(ax, title, "design" if single else "number of the design", "nats")
    ax.fill_between(at[order], (gains - 2 * errors)[order], (gains + 2 * errors)[order],
                    color=ALEATORIC, alpha=0.6, lw=0, label="±2 standard errors")  # fmt: skip
    ax.plot(at[order], gains[order], ".-", color=SERIES[0], label=found.estimator)
    ax.plot(at[best], gains[best], "o", color=SERIES[1], ms=8, label=f"best: {at[best]:g}")
    legend(ax)
    return ax


def weights(posterior: Posterior, *, n: int = 50, ax: Any = None) -> Any:
    """The weights of each layer: where they are, and how uncertain.

    Parameters
    ----------
    posterior : Posterior
        A posterior with weights.
    n : int, default 50
        The number of draws, fewer if fewer were kept.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        For each tensor of weights, the middle 90 % of its posterior means, and the median of its
        standard deviations around the median mean.
    """
    try:
        draws = posterior.draw(n)
    except MethodError:  # fewer were kept
        draws = posterior.draw()
    tensors = {k: v.detach().cpu().double().flatten(1).numpy() for k, v in draws.items()
               if v.numel() and not k.startswith("likelihood.")}  # fmt: skip
    if not tensors:
        raise Unavailable(f"a {posterior.kind} posterior has no weights to draw")
    ax = axes(
        ax, f"weights of {posterior.method.name}", "value", "", (6.0, 1.2 + 0.4 * len(tensors))
    )
    for k, values in enumerate(tensors.values()):
        mean = values.mean(0)
        std = float(np.median(values.std(0))) if len(values) > 1 else 0.0
        low, middle, high = np.quantile(mean, [0.05, 0.5, 0.95])
        first = k == 0
        ax.hlines(k, low, high, color=SERIES[0], lw=5, alpha=0.45,
                  label="90 % of the means" if first else None)  # fmt: skip
        ax.errorbar(middle, k, xerr=std, color=SERIES[1], marker="o", ms=4, capsize=3,
                    label="median mean ± median std" if first else None)  # fmt: skip
    ax.set_yticks(range(len(tensors)), list(tensors))
    ax.invert_yaxis()
    ax.axvline(0.0, color=INK, lw=0.8)
    legend(ax)
    return ax
