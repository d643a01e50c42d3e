"""Reference posteriors: every parameter's mean, spread and R-hat against posteriordb's draws.

    DOXA_DATA=... python -m benchmarks.posteriordb [NAME ...] [--method nuts] [--members 8]

One row per posterior, with its worst parameter: |Δmean| in reference standard deviations, the ratio
of standard deviations farthest from 1, R-hat, the smallest effective sizes, and the time with
everything counted. `benchmarks/results/posteriordb.json` keeps every parameter's figures; a run of
some posteriors replaces only theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import doxa

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "posteriordb"))

from compare import misses, table, worst  # noqa: E402
from models import MODELS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "posteriordb.json"


def sampler(args: argparse.Namespace) -> Any:
    lengths = {"draws": args.draws, "burn_in": args.burn_in}
    if args.method == "metropolis":
        return doxa.get_method("metropolis")(**lengths, thin=args.thin)
    kind = doxa.get_method(args.method)
    extra = {"leapfrog": args.leapfrog} if args.method == "hmc" else {}
    target = args.target_accept
    return kind(**lengths, mass=args.mass, target_accept=target, thin=args.thin, **extra)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    reference = MODELS[name]()
    began = time.perf_counter()
    draws = doxa.sample(
        reference.log_density, reference.init, sampler(args), args.members, seed=args.seed,
        constraints=reference.constraints, jitter=reference.jitter, engine=args.engine,
        progress=args.progress,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    rows = table(reference, dict(draws))
    found = draws.diagnostics
    return {
        "method": repr(draws.method), "members": args.members, "seed": args.seed,
        "seconds": round(seconds, 1), "mode": found["mode"], "status": str(draws.status),
        "reason": draws.status.reason, "divergences": found.get("divergences"),
        "leapfrogs": found.get("leapfrogs"), "worst": worst(rows), "misses": misses(rows),
        "parameters": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--method", default="nuts", choices=["nuts", "hmc", "metropolis"])
    parser.add_argument("--mass", default="full", choices=["diagonal", "full"])
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--burn-in", type=int, default=1000)
    parser.add_argument("--thin", type=int, default=1)
    parser.add_argument("--leapfrog", type=int, default=16)
    parser.add_argument("--target-accept", type=float, default=0.8)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    unknown = [n for n in args.names if not any(n in name for name in MODELS)]
    if unknown:
        parser.error(f"no posterior matches {unknown}; there are {list(MODELS)}")
    print(f"{'posterior':42} {'|Δ|':>6} {'ratio':>6} {'R-hat':>7} {'ESS':>6} {'div':>4} {'s':>6}")
    for name in MODELS:
        if args.names and not any(n in name for n in args.names):
            continue
        row = measure(name, args)
        bad = row["worst"]
        print(
            f"{name:42} {bad['shift']:6.3f} {bad['ratio']:6.3f} {bad['rhat']:7.4f} "
            f"{bad['ess_bulk']:6.0f} {row['divergences'] or 0:4d} {row['seconds']:6.0f} "
            f"{'; '.join(row['misses'])}",
            flush=True,
        )
        key = args.method
        kept = json.loads(args.out.read_text()) if args.out.exists() else {}
        kept.setdefault(name, {})[key] = row
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
