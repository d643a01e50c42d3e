"""One process of a fit by several, started by tests/driver/test_processes.py.

    python -m torch.distributed.run --standalone --nproc-per-node N several_processes.py OUT CASES

Each process makes the fits of some cases, and writes what it got to OUT/RANK.json: for each case a
hash of the weights or draws, of predictions and of the status, and the process of each block.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import doxa
from doxa.store import claims

# One method of each family that divides members, and one that does not.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ensemble": ("deep-ensemble", {}),
    "swag": (doxa.SWAG(rank=2, cycle=1), {}),
    "variational": ("mean-field", {}),
    "laplace": ("laplace", {}),
    "sgld": (doxa.SGLD(draws=4, burn_in=6, thin=2), {}),
    "nuts": (doxa.NUTS(draws=4, burn_in=4), {}),
    "process": ("gp", {"members": 1, "runs": None}),
}


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(80, 2, generator=g)
    return x, torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(80, generator=g)


def fitted(case: str, **more: Any) -> Any:
    method, options = CASES[case]
    net = None if case == "process" else doxa.nets.mlp(2, 1, (8,))
    given: dict[str, Any] = {
        "members": 6, "runs": doxa.Runs(seeds=[0, 1]), "steps": 20, "block_size": 2,
        "progress": False, **options, **more,
    }  # fmt: skip
    if case in ("sgld", "nuts", "process"):
        del given["steps"]
    return doxa.fit(net, rows(), method, **given)


def facts(found: Any) -> dict[str, Any]:
    digest = hashlib.sha256()
    each = found if isinstance(found, doxa.Sweep) else [found]
    for posterior in each:
        for name, value in sorted(posterior.tensors().items()):
            digest.update(name.encode() + value.detach().double().numpy().tobytes())
        p = posterior.predict(rows()[0][:7])
        digest.update(p.mean.double().numpy().tobytes() + p.std.double().numpy().tobytes())
        digest.update(f"{posterior.status}{posterior.validation}".encode())
    by = (each[0].diagnostics.processes or {}).get("blocks_by", [])
    return {"hash": digest.hexdigest(), "by": by, "blocks": each[0].diagnostics.blocks["count"]}


def killed(out: Path) -> None:
    """A fit with a folder, slow enough to be killed in the middle of it."""
    claims.RENEW, claims.EXPIRES = 0.2, float(os.environ.get("EXPIRES", "30"))

    def fit(checkpoint: Any) -> Any:
        return fitted("ensemble", runs=None, members=6, steps=int(os.environ["STEPS"]),
                      checkpoint=checkpoint, checkpoint_every=0.05, validation=None,
                      engine="stack:eager")  # fmt: skip

    write(out / f"{os.environ.get('NAME', 'done')}.json", facts(fit(out / "run")))


def write(path: Path, found: Any) -> None:
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(found))
    aside.replace(path)


def main() -> None:
    out, cases = Path(sys.argv[1]), sys.argv[2].split(",")
    rank = os.environ.get("RANK", "0")
    if cases == ["killed"]:
        killed(out)
        return
    found: dict[str, Any] = {}
    for case in cases:
        posterior = fitted(case)
        found[case] = facts(posterior)
        if case == "ensemble":
            posterior[0].save(out / "saved")
            found["there"] = (out / "saved" / "meta.json").exists()
    if "errors" in os.environ:
        began = time.monotonic()
        found["errors"] = []
        for more in ({"lr": 0.01 if rank == "0" else 0.02}, {"steps": 3 if rank == "1" else -3}):
            try:
                fitted("ensemble", **more)
                found["errors"].append("")
            except doxa.errors.DoxaError as error:
                found["errors"].append(f"{type(error).__name__}: {error}")
        found["seconds"] = time.monotonic() - began
    write(out / f"{rank}.json", found)


if __name__ == "__main__":
    main()
