"""Is "ok" true with few rows? Simulated tables of 8 to 49 rows, with every default.

    python -m benchmarks.few_rows [--methods map,gp] [--seeds 10] [--rest 2] [--quick] [--table]

Six columns of standard normal numbers, and five targets: linear, an additive curve, pure noise,
heavy tails (a line and Student's t noise with 3 degrees of freedom), and two classes. A fit is
evaluated on 2,000 new rows of the same process. The methods that a person tries first have --seeds
seeds, and all others --rest. Samplers of thousands of gradients per draw (`hmc`, `nuts`,
`metropolis`, `minibatch-mh`) and neural processes, which learn from tasks, are left out.

Of the fits with the status "ok", at each number of rows and for each method: the mean share of the
new rows inside 90 % intervals, the mean score less that of a constant (which is fitted to the same
rows), and the share of fits that are "ok". The promise is that the first is at least 0.80 and the
second at least -0.05.

Each fit is added to benchmarks/results/few_rows.jsonl as soon as it is known, so that a run can be
continued; the tables are made of all fits that are there. --quick: one seed, 12 and 30 rows, three
methods. --table: only the tables.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import doxa
from doxa.app.bench import Store

RESULTS = Path(__file__).parent / "results"
FIRST = ("deep-ensemble", "map", "swag", "mc-dropout", "mean-field", "laplace", "gp", "linear")
REST = (
    "snapshot", "bootstrap", "svgd", "swa", "batch-ensemble", "concrete-dropout", "last-layer-vi",
    "low-rank-vi", "rank1", "ivon", "nngp", "ntk", "sparse-gp", "deep-gp", "flow-vi", "mnf", "fbnn",
    "vip", "functional-prior", "sghmc", "sgnht", "sgld", "psgld", "cyclical", "constant-sgd",
)  # fmt: skip
TARGETS = ("linear", "curve", "noise", "tails", "classes")
ROWS = (8, 12, 20, 30, 49)
COLUMNS, NEW, LEVEL = 6, 2000, 0.9
LEAST_COVERAGE, LEAST_GAIN = 0.80, -0.05


class Table(NamedTuple):
    """Training rows and new rows of one process."""

    x: Tensor
    y: Tensor
    new_x: Tensor
    new_y: Tensor
    classes: bool


def simulated(target: str, rows: int, seed: int, new: int = NEW) -> Table:
    """A table of `rows` rows, and `new` new rows."""
    rng = np.random.default_rng([seed, rows, TARGETS.index(target)])
    x = rng.standard_normal((rows + new, COLUMNS))
    noise = rng.standard_normal(len(x))
    curve = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + 0.5 * x[:, 2]
    y = {
        "linear": x[:, 0] + 0.5 * noise,
        "curve": curve + 0.3 * noise,
        "noise": noise,
        "tails": x[:, 0] + 0.5 * rng.standard_t(3, len(x)),
        "classes": (rng.random(len(x)) < 1 / (1 + np.exp(-2 * x[:, 0]))).astype(float),
    }[target]
    classes = target == "classes"
    if classes and len(np.unique(y[:rows])) < 2:  # a table of one class cannot be fitted
        y[0] = 1 - y[0]
    xs, ys = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)
    ys = ys.long() if classes else ys
    return Table(xs[:rows], ys[:rows], xs[rows:], ys[rows:], classes)


def fitted(table: Table, method: str, seed: int) -> Any:
    """The posterior with every default; methods with a network have that of `doxa fit`."""
    net = doxa.nets.mlp(table.x.shape[1], 2 if table.classes else 1)
    own = method in ("gp", "linear", "sparse-gp", "deep-gp")
    likelihood = "categorical" if table.classes and not own else None
    return doxa.fit(
        None if own else net, (table.x, table.y), method, standardize=True, seed=seed,
        progress=False, likelihood="bernoulli" if table.classes and own else likelihood,
    )  # fmt: skip


def constant(table: Table) -> float:
    """The mean score on the new rows of the constant prediction of the training rows."""
    if table.classes:
        share = (table.y.sum() + 1) / (len(table.y) + 2)
        return float(torch.where(table.new_y == 1, share, 1 - share).log().mean())
    at = torch.distributions.Normal(table.y.double().mean(), table.y.double().std())
    return float(at.log_prob(table.new_y.double()).mean())


def new_scores(posterior: Any, table: Table) -> dict[str, float]:
    """The mean score on the new rows and, for numbers, the share inside 90 % intervals."""
    p = posterior.predict(table.new_x)
    y = table.new_y.to(p.mean.dtype) if table.new_y.is_floating_point() else table.new_y
    found = {"log_prob": float(p.log_prob(y.reshape(_shape(p, y))).double().mean())}
    if not table.classes:
        low, high = p.interval(LEVEL)
        y = y.reshape(low.shape)
        found["coverage"] = float(((y >= low) & (y <= high)).double().mean())
    return found


def _shape(p: Any, y: Tensor) -> Any:
    return p.mean.shape if y.is_floating_point() else y.shape


def one(target: str, rows: int, method: str, seed: int) -> dict[str, Any]:
    table = simulated(target, rows, seed)
    try:
        posterior = fitted(table, method, seed)
    except doxa.errors.DoxaError as error:  # a method for numbers only, for example
        return {"status": "error", "reason": str(error)}
    found = new_scores(posterior, table)
    held = posterior.diagnostics.get("held_out") or {}
    return {
        "status": str(posterior.status), "reason": posterior.status.reason, **found,
        "constant": constant(table), "held_out": dict(held),
    }  # fmt: skip


def _cells(store: Store) -> list[dict[str, Any]]:
    return [{**cell["key"], **cell["result"]} for cell in store.cells()]


def _mean(values: Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each) if each else math.nan


def page(cells: list[dict[str, Any]]) -> str:
    """The tables of all fits that are there."""
    cells = [c for c in cells if c["status"] != "error"]
    head = ["method", *(f"{rows} rows" for rows in ROWS)]
    lines = [
        "# Is \"ok\" true with few rows?", "",
        "`python -m benchmarks.few_rows`: tables of six columns (linear, an additive curve, pure "
        "noise, heavy tails,", "two classes), every default, 2,000 new rows per fit. Of the fits "
        "with the status \"ok\": the mean share of", "new rows inside 90 % intervals (at least "
        f"{LEAST_COVERAGE:.2f} is promised; numbers only), the mean score over", "that of a "
        f"constant in nats per row (at least {LEAST_GAIN:.2f}), and how many fits are \"ok\". "
        "**Bold**: a promise is not kept.", "",
        "| " + " | ".join(head) + " |", "|" + "---|" * len(head),
    ]  # fmt: skip
    for method in (*FIRST, *REST):
        own = [c for c in cells if c["method"] == method]
        if own:
            each = [_entry([c for c in own if c["rows"] == rows]) for rows in ROWS]
            lines.append("| " + " | ".join([method, *each]) + " |")
    return "\n".join([*lines, "", *_shares(cells)]) + "\n"


def _entry(own: list[dict[str, Any]]) -> str:
    ok = [c for c in own if c["status"] == "ok"]
    if not ok:
        return f"0 of {len(own)} ok" if own else ""
    coverage = _mean(c["coverage"] for c in ok if "coverage" in c)
    gain = _mean(c["log_prob"] - c["constant"] for c in ok)
    text = f"{coverage:.2f}, {gain:+.2f}, {len(ok)} of {len(own)} ok"
    return f"**{text}**" if coverage < LEAST_COVERAGE or gain < LEAST_GAIN else text


def _shares(cells: list[dict[str, Any]]) -> list[str]:
    """How often each method is "ok" from 12 rows on, and what the others are."""
    lines = ["| method, from 12 rows on | ok | other statuses |", "|---|---|---|"]
    for method in (*FIRST, *REST):
        own = [c["status"] for c in cells if c["method"] == method and c["rows"] >= 12]
        if own:
            others = {s: own.count(s) for s in sorted(set(own)) if s != "ok"}
            rest = ", ".join(f"{count} {name}" for name, count in others.items())
            lines.append(f"| {method} | {own.count('ok') / len(own):.0%} of {len(own)} | {rest} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", default=",".join((*FIRST, *REST)))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rest", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "few_rows.jsonl")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    logging.getLogger("doxa").setLevel(logging.ERROR)
    methods = ("deep-ensemble", "map", "gp") if args.quick else tuple(args.methods.split(","))
    store = Store(args.out)
    for seed in range(0 if args.table else 1 if args.quick else max(args.seeds, args.rest)):
        for method in methods:
            if seed >= (args.seeds if method in FIRST else args.rest):
                continue
            for rows in (12, 30) if args.quick else ROWS:
                for target in TARGETS:
                    key = {"rows": rows, "target": target, "method": method, "seed": seed}
                    store.cell(key, lambda: one(target, rows, method, seed))  # noqa: B023
            print(f"seed {seed}: {method}", flush=True)
    text = page(_cells(store))
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
