"""Fits whose processes divide rows; also one process of them, started by
tests/driver/test_divided_rows.py.

    python -m torch.distributed.run --standalone --nproc-per-node N divided_rows.py OUT all

Each process makes all fits, and writes what it got to OUT/RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import doxa

# Rows of a step or a pass in five blocks, or in blocks by the rule on the work.
_FIVE: dict[str, Any] = {"microbatches": 5, "rows": 83}
_RULE: dict[str, Any] = {"rows": 8192}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "hmc": (doxa.HMC(draws=3, burn_in=4, leapfrog=2), _FIVE),
    "nuts": (doxa.NUTS(draws=3, burn_in=4, max_depth=3), _FIVE),
    "metropolis": (doxa.Metropolis(draws=4, burn_in=4), _FIVE),
    "full": (doxa.Laplace(structure="full"), {**_FIVE, "steps": 6}),
    "kronecker": (doxa.Laplace(structure="kronecker"), {**_FIVE, "steps": 6}),
    "diagonal": (doxa.Laplace(structure="diagonal"), {**_FIVE, "steps": 6}),
    "sampled": (doxa.Laplace(structure="kronecker", curvature="sampled"), {**_FIVE, "steps": 6}),
    "map": ("map", {**_FIVE, "steps": 6}),
    "sgld": (doxa.SGLD(draws=4, burn_in=4, thin=1), _FIVE),
    "variational": ("mean-field", {**_FIVE, "steps": 6}),
    "large": ("map", {**_FIVE, "steps": 2, "hidden": (1024, 1024), "members": 1}),
    "hmc by rule": (
        doxa.HMC(draws=2, burn_in=0, leapfrog=2), {**_RULE, "hidden": (64, 64), "members": 4},
    ),
    "linear by rule": (doxa.BayesianLinear(features="rbf", count=120), {**_RULE, "members": 1}),
    "sparse process by rule": (
        doxa.SparseGP(inducing=112), {**_RULE, "steps": 3, "members": 1},
    ),
}  # fmt: skip


def rows(count: int = 83) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 2, generator=g)
    return x, torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(count, generator=g)


def fitted(case: str, **more: Any) -> doxa.Posterior:
    method, options = CASES[case]
    given: dict[str, Any] = {
        "members": 2, "progress": False, "validation": None, **options, **more,
    }  # fmt: skip
    data, hidden = rows(given.pop("rows")), given.pop("hidden", (8,))
    alone = case.startswith(("linear", "sparse"))
    return doxa.fit(None if alone else doxa.nets.mlp(2, 1, hidden), data, method, **given)


def facts(posterior: doxa.Posterior) -> dict[str, Any]:
    """A hash of weights, predictions and the status, and the blocks that each process computed."""
    digest = hashlib.sha256()
    for name, value in sorted(posterior.tensors().items()):
        digest.update(name.encode() + value.detach().double().numpy().tobytes())
    p = posterior.predict(rows()[0][:7])
    digest.update(p.mean.double().numpy().tobytes() + p.std.double().numpy().tobytes())
    digest.update(f"{posterior.status}{posterior.log_evidence}{posterior.elbo}".encode())
    found = posterior.diagnostics
    return {
        "hash": digest.hexdigest(), "blocks": (found.row_blocks or {"count": 1})["count"],
        "by": (found.processes or {}).get("row_blocks_by", []),
    }  # fmt: skip


def main() -> None:
    out, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
    found = {case: facts(fitted(case)) for case in CASES}
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
