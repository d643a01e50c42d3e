"""A checkpointed fit in a process of its own, for tests that interrupt or kill it.

    python worker.py METHOD CHECKPOINTS OUT [SECONDS BETWEEN CHECKPOINTS]

Prints "ready" when the fit is about to start and "running" when it has taken steps; writes the
posterior to OUT if it comes to its end. Imported, it gives the same fits to the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import doxa

METHODS: dict[str, dict[str, Any]] = {
    "map": {"method": doxa.MAP(), "steps": 400, "validation": 0.2, "patience": 10**6},
    "deep-ensemble": {"method": doxa.DeepEnsemble(), "steps": 600, "members": 3},
    "mean-field": {"method": doxa.MeanField(), "steps": 400, "members": 2},
    "hmc": {"method": doxa.HMC(draws=100, burn_in=60, leapfrog=8), "members": 2},
}


def fit(
    name: str,
    checkpoint: Path | None = None,
    every: float = 0.01,
    callbacks: Sequence[Any] = (),
    **settings: Any,
) -> Any:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(48, 3, generator=g)
    y = x[:, :1].sin() + 0.1 * torch.randn(48, 1, generator=g)
    net = doxa.nets.mlp(3, 1, hidden=(8,), activation="tanh")
    arguments = METHODS[name] | {"batch_size": 16, "standardize": True} | settings
    return doxa.fit(
        net, (x, y), checkpoint=checkpoint, checkpoint_every=every, callbacks=callbacks, **arguments
    )


def main(name: str, checkpoint: str, out: str, every: str = "0.01") -> None:
    torch.set_num_threads(1)

    said: list[int] = []

    def say(step: int, _info: dict[str, Any]) -> None:
        if not said:
            said.append(step)
            sys.stdout.write("running\n")
            sys.stdout.flush()

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    fit(name, Path(checkpoint), float(every), [say]).save(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
