"""Experimental design for a memory span: adaptive lists of digits against fixed lists.

    python examples/working_memory.py [figure.png]

A person repeats a list of l digits correctly with probability sigmoid(θ − l); the prior of the span
θ is N(7, 2²). Left: the expected information gain of one list about θ. Middle: the posterior of one
person during an adaptive study. Right: a thousand simulated people, with lists chosen one after the
other, with the twelve best lists fixed beforehand (optimised jointly, on sPCE), or with random
lists.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa.decide import eig
from doxa.decide.design import (
    Box,
    Experiment,
    Fixed,
    Rehearsal,
    Study,
    rehearse,
    train_policy,
    working_memory,
)  # fmt: skip

INK = "#22303c"
COLOURS = {"adaptive": "#2a6f97", "best fixed": "#d19a2a", "random": "#c8553d"}
TRIALS = 12


def best_fixed(trials: int = TRIALS, updates: int = 150) -> Tensor:
    """The jointly most informative lengths, for everyone: optimised by gradients, then rounded."""
    span = working_memory()
    box = Box(torch.tensor(1.0).double(), torch.tensor(15.0).double())
    free = Experiment(span.prior, span.likelihood, space=box)
    start = torch.linspace(4, 10, trials).double()
    policy = Fixed(box, trials, start)
    train_policy(free, policy, trials, updates=updates, outer=256, inner=255, rate=0.05)
    found = torch.stack([policy.design(1, t)[0] for t in range(trials)]).detach()
    return found.round().sort().values


def people(count: int, fixed: Tensor, trials: int = TRIALS) -> dict[str, Rehearsal]:
    source = torch.Generator().manual_seed(1)
    truth = 7 + 2 * torch.randn(count, generator=source, dtype=torch.float64)
    ways: dict[str, Any] = {"adaptive": "adaptive", "best fixed": fixed, "random": "random"}
    return {name: rehearse(working_memory(), truth, trials, way) for name, way in ways.items()}


def narrowing(truth: float = 8.6, trials: int = TRIALS) -> tuple[Study, Tensor, Tensor]:
    """One person's study, and the posterior density at some spans after 0..trials lists."""
    study = Study(working_memory())
    source = torch.Generator().manual_seed(3)
    at = torch.linspace(2, 14, 241).double()
    log_p = [study.experiment.prior.log_prob(at)]
    for _ in range(trials):
        length = study.next()
        right = torch.rand((), generator=source) < torch.sigmoid(truth - length)
        study.tell(length, float(right))
        length, y = study.history[-1]
        log_p.append(log_p[-1] + study.experiment.log_prob(y, at, length))
    density = torch.stack(log_p).softmax(1) / (at[1] - at[0])
    return study, at, density


def draw(found: dict[str, Rehearsal], fixed: Tensor, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    span = working_memory()
    lengths = span.designs().numpy()
    left.plot(lengths, eig(span, None, "exact").values, "o-", color=INK, label="exact", ms=4)
    for name, colour in (("nmc", "#c8553d"), ("pce", "#2a6f97")):
        few = eig(span, None, name, outer=10_000, inner=10)
        label = f"{name}, {few.kind}, 10 contrasts"
        left.errorbar(lengths, few.values, 2 * few.errors, fmt=".", color=colour, label=label)
    left.set_title(
        "expected information gain of one list, nats", fontsize=11, color=INK, loc="left"
    )
    left.set_xlabel("digits in the list", color=INK)

    study, at, density = narrowing()
    for t, curve in enumerate(density):
        base = -float(t)
        middle.fill_between(at, base, base + 2.2 * curve, color="#2a6f97", alpha=0.55, lw=0.4)
        if t < TRIALS:
            length, y = study.history[t]
            mark = {"marker": "o", "mfc": "none"} if float(y) else {"marker": "x"}
            middle.plot(float(length), base - 0.3, color=INK, ms=6, **mark)
    middle.axvline(8.6, color=INK, lw=0.8, ls="--")
    middle.set_title(
        "one person: lists right (o) and wrong (x)", fontsize=11, color=INK, loc="left"
    )
    middle.set_xlabel("span θ and its posterior; dashed: the truth", color=INK)
    middle.set_yticks([-t for t in range(0, TRIALS + 1, 3)], [f"{t}" for t in range(0, 13, 3)])
    middle.set_ylabel("lists so far", color=INK)

    for name, run in found.items():
        right.plot(run.error, "o-", color=COLOURS[name], label=name, ms=4)
    shown = ", ".join(f"{int(length)}" for length in fixed)
    right.set_title("a thousand people: error of the span", fontsize=11, color=INK, loc="left")
    right.set_xlabel(f"lists; fixed: {shown}", color=INK)
    right.set_ylim(0)
    for ax in (left, right):
        ax.legend(frameon=False, fontsize=9)
    for ax in (left, middle, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "working_memory.png")
    fixed = best_fixed()
    found = people(1000, fixed)
    print(f"{'':12}" + "".join(f"{t:>8}" for t in (0, 3, 6, 9, 12)) + "   lists; error of the span")
    for name, run in found.items():
        print(f"{name:12}" + "".join(f"{float(run.error[t]):8.3f}" for t in (0, 3, 6, 9, 12)))
        print(f"{'  in nats':12}" + "".join(f"{float(run.gain[t]):8.3f}" for t in (0, 3, 6, 9, 12)))
    draw(found, fixed, path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
