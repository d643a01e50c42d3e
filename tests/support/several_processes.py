"""One process of a fit by several, started by tests/driver/test_processes.py.

    python -m torch.distributed.run --standalone --nproc-per-node N several_processes.py OUT CASES

Each process makes the fits of some cases, and writes what it got to OUT/RANK.json: for each case a
hash of the weights or draws, of predictions and of the status, and the process of each block.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from short import short
from torch import Tensor

import doxa
from doxa.data import Tasks
from doxa.store import claims

# One method of each family. Others are named as in the registry, with their shortest settings.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ensemble": ("deep-ensemble", {}),
    "swag": (doxa.SWAG(rank=2, cycle=1), {}),
    "variational": ("mean-field", {}),
    "laplace": ("laplace", {}),
    "sgld": (doxa.SGLD(draws=4, burn_in=6, thin=2), {}),
    "nuts": (doxa.NUTS(draws=4, burn_in=4), {}),
    "map": ("map", {}),
    "process": ("gp", {"members": 1, "runs": None}),
    "exact": ("linear", {"members": 1, "runs": None}),
    "tasks": ("cnp", {"members": 1, "runs": None, "steps": 2}),
}
FIXED = ("sgld", "nuts", "process", "exact")  # these have their own number of steps


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(80, 2, generator=g)
    return x, torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(80, generator=g)


def method_of(case: str) -> tuple[Any, dict[str, Any]]:
    """The method of a case, and its own options of `doxa.fit`."""
    if case in CASES:
        return CASES[case]
    return short(case), {} if divided(case) else {"members": 1, "runs": None}


def divided(case: str) -> bool:
    """Whether the method of a case shares its members among processes."""
    method = CASES[case][0] if case in CASES else case
    cls = doxa.get_method(method) if isinstance(method, str) else type(method)
    shares: str = cls.shares
    return shares in ("members", "both")


def fitted(case: str, **more: Any) -> Any:
    method, options = method_of(case)
    method = short(method) if isinstance(method, str) else method
    row = doxa.methods()[method.name]
    learns = row.tasks == ("tasks",)
    net = doxa.nets.mlp(2, 1, (8,)) if method.needs_network else None
    given: dict[str, Any] = {
        "members": 6, "runs": doxa.Runs(seeds=[0, 1]), "steps": 20, "block_size": 2,
        "progress": False, **options, **more,
    }  # fmt: skip
    if case in FIXED or (case not in CASES and "draws" in vars(method)):
        given.pop("steps", None)
    if learns:
        x, y = rows()
        around = torch.linspace(-0.2, 0.2, 5)[:, None]
        data = Tasks((own + around, level.expand(5)) for own, level in zip(x, y, strict=True))
        found = doxa.fit(net, data, method, **given)
        each = [one.condition(x[:10], y[:10]) for one in as_list(found)]
        for one, first in zip(each, as_list(found), strict=True):
            one.record = first.record
        return each[0] if len(each) == 1 else each
    return doxa.fit(net, rows(), method, **given)


def as_list(found: Any) -> list[Any]:
    return list(found) if isinstance(found, doxa.Sweep | list) else [found]


def facts(found: Any) -> dict[str, Any]:
    digest = hashlib.sha256()
    each = as_list(found)
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


def full(out: Path) -> None:
    """A fit with a folder, whose disk is full for process 1 from some write on (FULL)."""
    rank, left = os.environ["RANK"], int(os.environ.get("FULL", "1000000000"))
    if rank == "1" and left < 1000:
        real, counted = os.fsync, itertools.count()

        def refuse(descriptor: int) -> None:
            if next(counted) >= left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        os.fsync = refuse
    try:
        found = facts(fitted("ensemble", runs=None, validation=None, checkpoint=out / "run",
                             checkpoint_every=0))  # fmt: skip
    except doxa.errors.DoxaError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    write(out / f"{rank}.json", found)


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
    if cases == ["full"]:
        full(out)
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
