"""Prior scale and noise of a Laplace approximation: by evidence during training, or by a grid.

    python -m benchmarks.evidence_training --data FOLDER [--sets yacht,concrete] [--splits 20]
    python -m benchmarks.evidence_training --table        # of all that is known

UCI sets, standard splits, the network of the UCI tables (50 ReLU units), all splits in one stacked
fit. "validation": N(0, s²) with s of a grid, by the log score on the last fifth of the training
rows, split by split, and a fit to all of them; "grid": s of the same grid by evidence; "after":
s and noise by evidence once training is over; "shared" and "layer": during training (Immer et al.
2021). The settings of training are those of the UCI tables, and were chosen for none of these.
Results are added to the file OUT, the table goes to benchmarks/results, the figure to docs/figures.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import doxa
from doxa.app.bench import Store, uci
from doxa.app.bench.uci import Problem
from doxa.evaluate import log_likelihood, rmse

RESULTS = Path(__file__).parent / "results" / "evidence_training.jsonl"
SCALES = (0.03, 0.1, 0.3, 1.0, 3.0)
STEPS = 40  # re-estimations during training
WAYS = {
    "validation": f"grid of {len(SCALES)} by validation", "grid": "the same grid by evidence",
    "after": "evidence after training", "shared": "evidence in training, one scale",
    "layer": "evidence in training, a scale a tensor",
}  # fmt: skip


def fitted(problem: Problem, way: str, structure: str, asked: dict[str, Any]) -> Any:
    """A posterior for each split."""
    if way == "validation":
        kept, held = problem.validation()
        grid = {"prior": [doxa.Normal(s) for s in SCALES]}
        tried = problem.fit(doxa.Laplace(structure), runs=doxa.Runs(rows=kept, grid=grid), **asked)
        best: dict[int, tuple[float, Any]] = {}
        for posterior, spec in zip(tried, tried.specs, strict=True):
            score = problem.score(posterior, held[spec.split])
            if spec.split not in best or score > best[spec.split][0]:
                best[spec.split] = score, spec.hyper["prior"]
        own = {"prior": [best[k][1] for k in range(len(kept))]}
        return problem.fit(
            doxa.Laplace(structure), runs=doxa.Runs(rows=problem.train, per_split=own), **asked
        )
    if way == "grid":
        runs = doxa.Runs(rows=problem.train, grid={"prior": [doxa.Normal(s) for s in SCALES]})
        return problem.fit(doxa.Laplace(structure), runs=runs, **asked).select(by="evidence")
    settings = {} if way == "after" else {"evidence_steps": STEPS, "tuned_scale": way}
    return problem.fit(doxa.Laplace(structure, tune="evidence", **settings), **asked)


def measured(name: str, way: str, structure: str, options: argparse.Namespace) -> dict[str, Any]:
    data = uci.load(uci.data_folder(options.data), name)
    train, test = data.train[: options.splits], data.test[: options.splits]
    problem = Problem(data.x, data.y, train, 50, seed=0)
    asked = {
        "likelihood": "gaussian", "schedule": "cosine", "epochs": options.epochs,
        "batch_size": 32, "lr": 0.01, "device": options.device,
    }  # fmt: skip
    start = time.perf_counter()
    sweep = fitted(problem, way, structure, asked)
    posteriors = list(sweep)
    seconds = time.perf_counter() - start
    pairs = zip(posteriors, test, strict=True)
    scores = [_scores(p, data.x[rows], data.y[rows]) for p, rows in pairs]
    return {
        "set": name, "way": way, "structure": structure, "splits": len(test),
        "epochs": options.epochs, "seconds": seconds,
        "log_likelihood": [each[0] for each in scores], "rmse": [each[1] for each in scores],
        "evidence": [p.log_evidence for p in posteriors],
        "scale": [_scale(p, hyper) for p, hyper in zip(posteriors, sweep.hyper, strict=True)],
        "status": [str(p.status) for p in posteriors],
    }  # fmt: skip


def _scores(posterior: Any, x: Tensor, y: Tensor) -> tuple[float, float]:
    p = posterior.predict(x)
    y = y.to(p.mean)
    return float(log_likelihood(p, y)), float(rmse(p, y))


def _scale(posterior: Any, hyper: Any) -> Any:
    found = posterior.diagnostics.get("prior_scale")
    return found[0] if found else hyper["prior"].std


def mean_error(values: list[float]) -> str:
    each = torch.tensor(values, dtype=torch.float64)
    return f"{float(each.mean()):.2f} ± {float(each.std() / len(each) ** 0.5):.2f}"


def difference(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Of the log-likelihood, split by split."""
    pairs = zip(row["log_likelihood"], other["log_likelihood"], strict=True)
    return "" if row is other else mean_error([a - b for a, b in pairs])


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Prior scale and noise by evidence in training, beside a grid", "",
        "`python -m benchmarks.evidence_training`: UCI, 50 ReLU units, linearised Laplace, "
        f"{rows[0]['epochs']} epochs, B = 32, rate .01 decaying, N(0, s²) with s of "
        f"{', '.join(map(str, SCALES))} in the grids; {STEPS} re-estimations in training. Mean "
        "and standard error over splits; \"gain\" is over the grid by validation, paired by "
        "split. Time is that of the fit over that of one fit with evidence after training.", "",
        "| set | matrix | prior scale | log-likelihood | gain | RMSE | log evidence | time "
        "| not ok |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    order = list(WAYS)
    rows = sorted(rows, key=lambda r: (r["set"], r["structure"], order.index(r["way"])))
    known = {(r["set"], r["structure"], r["way"]): r for r in rows}
    for r in rows:
        own = (r["set"], r["structure"])
        grid, one = known.get((*own, "validation")), known.get((*own, "after"))
        gain = difference(r, grid) if grid else ""
        cost = f"{r['seconds'] / one['seconds']:.1f}" if one else ""
        bad = sum(status != "ok" for status in r["status"])
        lines.append(
            f"| {r['set']} | {r['structure']} | {WAYS[r['way']]} "
            f"| {mean_error(r['log_likelihood'])} | {gain} | {mean_error(r['rmse'])} "
            f"| {mean_error(r['evidence'])} | {cost} | {bad} of {r['splits']} |"
        )
    return "\n".join(lines) + "\n"


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """The gain over the grid by validation, split by split."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    full = [r for r in rows if r["structure"] == "full"]
    sets = sorted({r["set"] for r in full})
    figure, panels = plt.subplots(1, len(sets), figsize=(3.1 * len(sets), 3.2), squeeze=False)
    for panel, name in zip(panels[0], sets, strict=True):
        known = {r["way"]: torch.tensor(r["log_likelihood"]) for r in full if r["set"] == name}
        ways = [way for way in ("grid", "after", "shared", "layer") if way in known]
        for k, way in enumerate(ways):
            gain = known[way] - known["validation"]
            spread = torch.linspace(-0.18, 0.18, len(gain))
            panel.plot(k + spread, gain, ".", color="#3b6ea5", alpha=0.6, markersize=5)
            panel.plot([k - 0.3, k + 0.3], [float(gain.mean())] * 2, color="#c0392b", linewidth=2)
        panel.axhline(0.0, color="0.6", linewidth=0.8)
        words = {
            "grid": "grid,\nevidence", "after": "after\ntraining",
            "shared": "in training,\nshared", "layer": "in training,\nlayer",
        }  # fmt: skip
        panel.set_xticks(range(len(ways)), [words[way] for way in ways], fontsize=7)
        panel.set_title(name.replace("_", " "), fontsize=9)
    panels[0][0].set_ylabel("test log-likelihood over the grid's by validation", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=None, help="the folder of data sets, or DOXA_DATA")
    parser.add_argument("--sets", default="yacht,concrete")
    parser.add_argument("--structures", default="full")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing after these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="the table and figure alone")
    options = parser.parse_args()
    store = Store(options.out)
    if options.table:
        rows = [cell["result"] for cell in store.cells()]
        RESULTS.with_suffix(".md").write_text(table(rows))
        figure(rows, RESULTS.parents[2] / "docs" / "figures" / "evidence_training.png")
        return
    began = time.monotonic()
    for name in options.sets.split(","):
        for structure in options.structures.split(","):
            for way in options.ways.split(","):
                if time.monotonic() - began > 60 * options.minutes:
                    return
                row = measured(name, way, structure, options)
                key = {"table": "evidence_training", "set": name, "structure": structure}
                store.put(key | {"way": way}, row, row["seconds"])
                found = f"{name} {structure} {way}: {mean_error(row['log_likelihood'])}"
                print(found, f"in {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
