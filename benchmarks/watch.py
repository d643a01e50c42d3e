"""False alarms and delays of `doxa watch`.

    python -m benchmarks.watch

False alarms. Streams of 10,000 rows at the boundary of the null hypotheses: rows miss their
interval with the largest probability that the certificate allows, and have a low score with the
largest share that it allows; once independently, once together (a row with a low score is always a
miss). An alarm of either test, at any time, counts. For the inputs: exchangeable rows of 4 columns,
with a reference of 1,000 values.

Delays. The number of rows from a change until the alarm, where the change comes at the start, after
1,000 or after 5,000 rows of good behaviour (90 % of rows held, 5 % low, inputs as in the
reference).

The certificate is that of 400 test rows with 90 % held: misses at most 13.4 %, low scores at most
7.3 %. Results: `benchmarks/results/watch.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa.evaluate.betting import conformal_p, evidence, mean_bets, shape_bets
from doxa.noise import generator
from doxa.posterior.certificate import clopper_pearson

RESULTS = Path(__file__).parent / "results" / "watch.json"
LEVEL = 0.05
ROWS = 10_000
MISSES = 1.0 - clopper_pearson(360, 400)[0]
LOW = clopper_pearson(19, 400)[1]
CHANGES = (0, 1000, 5000)  # rows before a change
INPUTS = 4
CHUNK = 50  # streams at a time


def first(log_m: Tensor, level: float) -> Tensor:
    """The row, from 0, at which each stream [S, T] raises an alarm; infinite if it does not."""
    over = log_m >= -math.log(level)
    at = over.double().argmax(-1).double()
    return torch.where(over.any(-1), at, math.inf)


def alarm_of_means(x: Tensor, bound: float, level: float) -> Tensor:
    return first(evidence(mean_bets(x, bound)).log_m, level)


def alarm_of_inputs(values: Tensor, earlier: Tensor, source: torch.Generator) -> float:
    ties = torch.rand(values.shape, generator=source, dtype=torch.float64)
    log_e = shape_bets(conformal_p(values, earlier, ties).T).flatten(0, 1)
    return float(first(evidence(log_e).log_m, LEVEL))


def false_alarms(streams: int, rows: int, together: bool, split: float = 0.5) -> int:
    """The number of streams at the boundary in which one of the two tests raises an alarm."""
    source, alarms = generator("benchmark", "watch", together), 0
    for start in range(0, streams, CHUNK):
        size = min(CHUNK, streams - start)
        u, v = (torch.rand(size, rows, generator=source) for _ in range(2))
        misses, low = (u < MISSES).double(), ((u if together else v) < LOW).double()
        found = [
            alarm_of_means(misses, MISSES, split * LEVEL), alarm_of_means(low, LOW, split * LEVEL)
        ]  # fmt: skip
        alarms += int(torch.minimum(*found).isfinite().sum())
    return alarms


def false_alarms_of_inputs(streams: int, rows: int) -> int:
    source, alarms = generator("benchmark", "watch", "inputs"), 0
    for _ in range(streams):
        both = torch.randn(1000 + rows, INPUTS, generator=source)
        both[:, 0] = both[:, 0].round()  # with ties
        alarms += math.isfinite(alarm_of_inputs(both[1000:], both[:1000].sort(0).values, source))
    return alarms


def delay(good: float, bad: float, bound: float, change: int, streams: int) -> Tensor:
    """Rows from the change to the alarm; negative for an alarm before it."""
    source = generator("benchmark", "watch", "delay", bad, change)
    rate = torch.full((change + ROWS,), good)
    rate[change:] = bad
    x = (torch.rand(streams, change + ROWS, generator=source) < rate).double()
    return alarm_of_means(x, bound, LEVEL / 2) + 1 - change


def delay_of_inputs(shift: float, change: int, streams: int) -> Tensor:
    source = generator("benchmark", "watch", "shift", shift, change)
    found = []
    for _ in range(streams):
        rows = torch.randn(1000 + change + 3000, INPUTS, generator=source)
        rows[1000 + change :, 0] += shift
        at = alarm_of_inputs(rows[1000:], rows[:1000].sort(0).values, source)
        found.append(at + 1 - change)
    return torch.tensor(found, dtype=torch.float64)


def summary(delays: Tensor) -> dict[str, Any]:
    found = delays[delays.isfinite() & (delays > 0)]
    quantiles = (
        found.quantile(torch.tensor([0.5, 0.9], dtype=torch.float64)) if len(found) else None
    )
    return {
        "found": len(found) / len(delays), "before": float((delays <= 0).double().mean()),
        "median": None if quantiles is None else float(quantiles[0]),
        "90 %": None if quantiles is None else float(quantiles[1]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--inputs", type=int, default=200, help="streams of inputs")
    parser.add_argument("--delays", type=int, default=100, help="streams for each delay")
    parser.add_argument("--delays-inputs", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "level": LEVEL, "misses at most": MISSES, "low at most": LOW, "rows": ROWS,
        "streams": given.streams, "streams of inputs": given.inputs,
        "rows of inputs": 2000, "delay": [],
    }  # fmt: skip
    for together in (False, True):
        name = "together" if together else "independent"
        found[f"false alarms, {name}"] = false_alarms(given.streams, ROWS, together)
        save(found)
    found["false alarms, inputs"] = false_alarms_of_inputs(given.inputs, 2000)
    save(found)
    for what, good, bound, rates in (
        ("coverage", 0.10, MISSES, (0.15, 0.2, 0.3, 0.5)), ("scores", 0.05, LOW, (0.1, 0.2, 0.4)),
    ):  # fmt: skip
        for bad in rates:
            for change in CHANGES:
                row = summary(delay(good, bad, bound, change, given.delays))
                found["delay"].append({"what": what, "to": bad, "after": change} | row)
    save(found)
    for shift in (0.25, 0.5, 1.0):
        for change in (0, 1000):
            row = summary(delay_of_inputs(shift, change, given.delays_inputs))
            found["delay"].append({"what": "inputs", "to": shift, "after": change} | row)
            save(found)


def save(found: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
