"""The status of a fit on simulated tables: how often "ok" is false, and how often it is withheld.

    python -m benchmarks.status [--out FILE] [--first FIT] [--limit FITS] [--table]

Each fit is of one table, one method and one setting: the defaults, or bad ones on purpose (a tenth
of the learning rate, few steps, a narrow or a wide prior, noise that is given too small). Its truth
is measured on 5,000 new rows:

    bad     90 % intervals hold less than .82 of them, or the score is more than .05 nats below a
            constant, or more than .15 nats below the best yardstick of all training rows
    good    none of these by half of the margin: intervals hold at least .86, the score is at most
            .025 nats below a constant, and at most .075 below the best yardstick
    between neither; not counted

A miss is a bad fit whose status is "ok", a false alarm a good fit whose status is not. For classes
there are no intervals: in their place, the mean probability of the likeliest class is more than .08
(good: at most .04) above its accuracy. Results are added to FILE, one line of JSON per fit; fits
that are there are not repeated, so that a run can be continued. `--table` prints the summary only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import doxa
from doxa.driver.yardsticks import yardsticks

NEW_ROWS = 5000
BAD, GOOD = 1.0, 0.5  # shares of the margins
COVERAGE, CONSTANT, YARDSTICK = 0.08, 0.05, 0.15  # margins
METHODS = ("deep-ensemble", "mc-dropout", "mean-field", "map", "swag", "laplace")
SIZES = (50, 80, 150, 300, 1000)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {}, "slow": {"lr": 1e-4}, "few steps": {"steps": 60},
    "narrow prior": {"prior": doxa.Normal(0.02)}, "wide prior": {"prior": doxa.Normal(20.0)},
    "small noise": {},
}  # fmt: skip


def noise(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, generator=g)


def heavy(n: int, g: torch.Generator) -> Tensor:
    """Student-t with 3 degrees of freedom."""
    return noise(n, g) / (torch.randn(3, n, generator=g).square().sum(0) / 3).sqrt()


def uniform(n: int, columns: int, low: float, high: float, g: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, columns, generator=g)


def linear(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=g)
    return x, x[:, 0] - 0.5 * x[:, 1] + 0.5 * noise(n, g)


def cosine(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = uniform(n, 1, -3, 3, g)
    return x, torch.cos(3 * x[:, 0]) + 0.1 * noise(n, g)


def sine(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = uniform(n, 1, 0, 10, g)
    return x, torch.sin(2 * x[:, 0]) + 0.1 * noise(n, g)


def cubic(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = uniform(n, 1, -4, 4, g)
    return x, x[:, 0] ** 3 / 20 + 0.2 * noise(n, g)


def additive(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = uniform(n, 5, -2, 2, g)
    return x, torch.sin(2 * x[:, 0]) + x[:, 1] ** 2 / 2 + x[:, 2] + 0.3 * noise(n, g)


def step(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = uniform(n, 2, -2, 2, g)
    return x, (x[:, 0] > 0).float() + 0.1 * noise(n, g)


def interaction(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=g)
    return x, x[:, 0] * x[:, 1] + 0.3 * noise(n, g)


def spreading(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = uniform(n, 3, -2, 2, g)
    return x, x[:, 0] + (0.1 + 0.4 * x[:, 1].abs()) * noise(n, g)


def tails(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=g)
    return x, torch.sin(2 * x[:, 0]) + 0.3 * heavy(n, g)


def nothing(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, generator=g), noise(n, g)


def two_classes(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 5, generator=g)
    p = torch.sigmoid(2 * x[:, 0] - x[:, 1])
    return x, (torch.rand(n, generator=g) < p).long()


def rings(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = uniform(n, 2, -3, 3, g)
    p = torch.sigmoid(6 * torch.sin(2 * x.square().sum(1).sqrt()))
    return x, (torch.rand(n, generator=g) < p).long()


def three_classes(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=g)
    logits = torch.stack([2 * x[:, 0], 2 * x[:, 1], x[:, 2] ** 2 - 1], 1)
    gumbel = -torch.rand(n, 3, generator=g).log().neg().log()
    return x, (logits + gumbel).argmax(1)


TABLES: tuple[Callable[[int, torch.Generator], tuple[Tensor, Tensor]], ...] = (
    linear, cosine, sine, cubic, additive, step, interaction, spreading, tails, nothing,
    two_classes, rings, three_classes,
)  # fmt: skip


def cells() -> Iterator[tuple[Any, int, str, str]]:
    """Tables, sizes, methods and settings, in an order of which every beginning is a mixture. Bad
    settings are a third of the fits."""
    whole = list(itertools.product(TABLES, SIZES, METHODS, SETTINGS))
    g = torch.Generator().manual_seed(13)
    for i in torch.randperm(len(whole), generator=g).tolist():
        table, n, method, setting = whole[i]
        keep = setting == "default" or bool(torch.rand((), generator=g) < 0.2)
        classes = setting == "small noise" and table(8, g)[1].dtype == torch.int64
        refused = method == "swag" and setting == "few steps"
        if keep and not (classes or refused):
            yield table, n, method, setting


def measure(table: Any, n: int, method: str, setting: str) -> dict[str, Any]:
    """One fit, its status, and its truth."""
    g = torch.Generator().manual_seed(n + 1000 * TABLES.index(table))
    x, y = table(n, g)
    new_x, new_y = table(NEW_ROWS, g)
    classes = y.dtype == torch.int64
    count = int(y.max()) + 1 if classes else 1
    likelihood: Any = None
    if setting == "small noise":
        likelihood = doxa.Gaussian(noise=0.05)
    began = time.perf_counter()
    posterior = doxa.fit(
        doxa.nets.mlp(x.shape[1], count), (x, y), method, likelihood=likelihood, standardize=True,
        progress=False, **SETTINGS[setting],
    )  # fmt: skip
    seconds = time.perf_counter() - began
    p = posterior.predict(new_x)
    truth = new_y if classes or y.ndim > 1 or p.mean.ndim == 1 else new_y[:, None]
    score = float(p.log_prob(truth).double().mean())
    assumed: Any = doxa.Categorical() if classes else doxa.likelihoods.assumed("gaussian")
    began = time.perf_counter()
    found = yardsticks(x, y, assumed, classes=count if classes else 0)
    spent = time.perf_counter() - began
    gains = {each.name: float(each.log_prob(new_x, new_y).mean()) - score for each in found}
    if classes:
        probs = p.probs
        gap = float(probs.amax(1).mean() - (probs.argmax(1) == new_y).double().mean())
        held = 0.9 - gap
    else:
        low, high = p.interval(0.9)
        held = float(((truth >= low) & (truth <= high)).double().mean())
    return {
        "table": table.__name__, "n": n, "method": method, "setting": setting,
        "status": str(posterior.status), "coverage": held, "score": score, "gains": gains,
        "held_out": posterior.diagnostics.get("held_out"),
        "yardsticks": posterior.diagnostics.get("yardsticks"),
        "seconds": seconds, "yardstick_seconds": spent,
    }  # fmt: skip


def truth(row: dict[str, Any]) -> str:
    """ "bad", "good" or "between"."""
    gains = row["gains"]
    losses = (
        (0.9 - row["coverage"]) / COVERAGE, gains["constant"] / CONSTANT,
        max(gains.values()) / YARDSTICK,
    )  # fmt: skip
    return "bad" if max(losses) > BAD else "good" if max(losses) <= GOOD else "between"


def table(rows: list[dict[str, Any]]) -> str:
    """Misses and false alarms by size."""
    lines = ["| rows | bad fits | misses | good fits | false alarms |", "|---|---|---|---|---|"]
    for n in [*sorted({row["n"] for row in rows}), "all"]:
        some = [row for row in rows if n in (row["n"], "all")]
        bad = [row for row in some if truth(row) == "bad"]
        good = [row for row in some if truth(row) == "good"]
        missed = sum(row["status"] == "ok" for row in bad)
        alarms = sum(row["status"] != "ok" for row in good)
        lines.append(f"| {n} | {len(bad)} | {missed} | {len(good)} | {alarms} |")
    for what, wanted in (("good", True), ("bad", False)):
        some = [row for row in rows if truth(row) == what and (row["status"] == "ok") != wanted]
        kinds = Counter((row["status"], row["method"], row["setting"]) for row in some)
        lines.append(f"\n{'false alarms' if wanted else 'misses'}: {dict(kinds)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("status.jsonl"))
    parser.add_argument("--first", type=int, default=0, help="fits to leave out at the beginning")
    parser.add_argument("--limit", type=int, default=700, help="fits in all, at most")
    parser.add_argument("--table", action="store_true", help="print the summary only")
    arguments = parser.parse_args()
    logging.getLogger("doxa").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    if arguments.out.exists():
        rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    done = {(row["table"], row["n"], row["method"], row["setting"]) for row in rows}
    few = itertools.islice(cells(), arguments.first, arguments.first + arguments.limit)
    for made, n, method, setting in few:
        if arguments.table or (made.__name__, n, method, setting) in done:
            continue
        row = measure(made, n, method, setting)
        rows.append(row)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
