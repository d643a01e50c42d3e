"""The doctor on forty good and forty deliberately broken runs: the confusion table of its page.

    python benchmarks/doctor.py [--first 3000] [--every 1]

Run i has the seed first + i, which makes its data, its split and its fit. Thresholds and settings
were chosen on seeds below 1,000 and corrected after passes over 1,000 to 1,079 and 2,000 to 2,079,
whose results docs/doctor.md gives; the table is of fresh seeds, from 3,000 on. A broken run counts
as found when a warning or worse comes from a check that names the planted fault, a good run as a
false alarm when any check gives a warning or worse.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from doctor_runs import BROKEN, GOOD, Case

import doxa
from doxa.diagnose import data, doctor

RESULTS = Path(__file__).parent / "results" / "doctor.json"


def visit(case: Case, seed: int) -> dict[str, Any]:
    """Fit, look, and say whether the doctor was right."""
    start = time.process_time()
    posterior, train, test = case.make(seed)
    fitted = time.process_time()
    diagnosis = doctor(posterior, train, test)
    seconds = time.process_time() - fitted
    alarms = {finding.check: finding.verdict for finding in diagnosis.alarms}
    found = any(check in case.reasons for check in alarms)
    return {
        "run": case.name, "fault": case.fault, "seed": seed, "reasons": list(case.reasons),
        "alarms": alarms, "found": found, "ok": diagnosis.ok, "fit_seconds": fitted - start,
        "doctor_seconds": seconds,
        "findings": {f.check: [f.verdict, f.value, f.words] for f in diagnosis.alarms},
    }  # fmt: skip


def visits(cases: Sequence[Case], seeds: Sequence[int]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    logging.getLogger("doxa").setLevel(logging.ERROR)
    return [visit(case, seed) for case, seed in zip(cases, seeds, strict=True)]


def confusion(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """{planted fault: {runs, right reason, other reason only, no alarm}}."""
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        name = row["fault"] or "none (good)"
        counts = table.setdefault(name, {"runs": 0, "right": 0, "other": 0, "none": 0})
        counts["runs"] += 1
        kind = "none" if row["ok"] else "right" if row["found"] else "other"
        counts[kind] += 1
    return table


def markdown(table: dict[str, dict[str, int]]) -> str:
    lines = ["| planted fault | runs | alarm, right reason | alarm, other reason only | no alarm |"]
    lines.append("|---|---|---|---|---|")
    for name, counts in table.items():
        right = "–" if name.startswith("none") else str(counts["right"])
        lines.append(
            f"| {name} | {counts['runs']} | {right} | {counts['other']} | {counts['none']} |"
        )
    return "\n".join(lines)


def shares(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(broken runs found for the right reason, good runs with an alarm)."""
    broken = [row["found"] for row in rows if row["fault"]]
    good = [not row["ok"] for row in rows if not row["fault"]]
    return sum(broken) / max(1, len(broken)), sum(good) / max(1, len(good))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=3000, help="the seed of the first run")
    parser.add_argument("--every", type=int, default=1, help="only every so many runs")
    parser.add_argument("--out", type=Path, default=None, help="where to write; default: results/")
    asked = parser.parse_args()
    cases = [*GOOD, *BROKEN]
    chosen = range(0, len(cases), asked.every)
    rows = visits([cases[i] for i in chosen], [asked.first + i for i in chosen])
    right, false = shares(rows)
    for row in rows:
        wrong = not row["found"] if row["fault"] else not row["ok"]
        if wrong:
            print(f"wrong: {row['fault'] or 'good'}: {row['run']} (seed {row['seed']})")
            for check, (verdict, _, words) in row["findings"].items():
                print(f"    {check}: {verdict}: {words}")
    print(markdown(confusion(rows)))
    print(f"right reason: {right:.1%} of the broken; false alarms: {false:.1%} of the good")
    result = {
        "first_seed": asked.first, "right_reason": right, "false_alarms": false,
        "confusion": confusion(rows), "alpha": data.ALPHA,
        "cpu_seconds": {
            "fits": sum(r["fit_seconds"] for r in rows),
            "doctor": sum(r["doctor_seconds"] for r in rows),
        },
        "machine": platform.processor() or platform.machine(), "threads": 1,
        "python": platform.python_version(), "torch": torch.__version__,
        "doxa": doxa.__version__, "runs": rows,
    }  # fmt: skip
    path = asked.out or (RESULTS if asked.every == 1 else None)
    if path is not None:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
