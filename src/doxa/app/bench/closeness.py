"""How near methods come to the posterior itself, where chains can sample it.

Two tables in the manner of Izmailov et al. (2021): agreement of the likeliest classes, and total
variation of the class probabilities, with long chains of HMC. One is of the last layer, on the
features of one network (`last_layer`); the other of all weights of a LeNet on so few images that
full-data chains are affordable. There the reference of a row is the mean of all chains of all
seeds, and that of the chains' own row the mean of the other seeds': what two such runs differ by.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.app.bench.cells import Result
from doxa.app.bench.image_cells import fitted_and_scored
from doxa.app.bench.image_methods import find
from doxa.app.bench.image_settings import settings
from doxa.app.bench.tables import Table, mean_of
from doxa.evaluate.closeness import agreement, total_variation
from doxa.predictive import Predictive

CHAINS = "hmc-all"  # the row that the others are compared with
ROWS = 1000  # test rows whose probabilities are kept
_STEPS = 65535


def reference_cell(
    folder: str | Path, name: str, method: str, seed: int = 0, device: str = "cpu",
    scale: str = "full",
) -> Result:  # fmt: skip
    """One method on a few images of "fashion_mnist", with its probabilities at test rows."""
    s = settings("reference", scale)
    result, posterior, data = fitted_and_scored(folder, name, method, s, seed, device)
    n = s.samples if find(method).draws else None
    result["probs"] = packed(posterior.predict(data.x_test[:ROWS], n).probs)
    return result


def against_chains(title: str, cells: Mapping[str, Sequence[Result]]) -> Table:
    """Rows of all weights: {method: its results, one a seed}."""
    table = Table(title, ["method", "agreement", "total variation"])
    known = {m: [unpacked(r["probs"]) for r in own] for m, own in cells.items() if has(own)}
    chains = known.get(CHAINS, [])
    for method, seeds in known.items() if chains else ():
        found = []
        for i, probs in enumerate(seeds):
            others = chains[:i] + chains[i + 1 :] if method == CHAINS else chains
            if others:
                p, q = (Predictive.from_probs(t) for t in (probs, torch.stack(others).mean(0)))
                found.append((agreement(p, q), total_variation(p, q)))
        if found:
            table.rows.append(
                [method, *(mean_of(values, 3) for values in zip(*found, strict=True))]
            )
    return table


def has(own: Sequence[Result]) -> bool:
    return all("probs" in result for result in own)


def last_layer(title: str, results: Sequence[Result]) -> Table:
    """Of approximations to the last layer's posterior, from chains on the same features."""
    table = Table(title, ["method", "agreement", "total variation"])
    each = [result["closeness"] for result in results if "closeness" in result]
    for method in each[0] if each else ():
        columns = [
            [one[method][key] for one in each] for key in ("agreement", "total_variation")
        ]  # fmt: skip
        table.rows.append([method, *(mean_of(values, 4) for values in columns)])
    return table


def packed(probs: Tensor) -> dict[str, Any]:
    """As text, in steps of 1/65535."""
    steps = np.rint(_STEPS * probs.double().cpu().numpy()).astype("<u2")
    text = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode()
    return {"shape": list(probs.shape), "text": text}


def unpacked(stored: Mapping[str, Any]) -> Tensor:
    """[rows, classes] in float64, each row adding up to one."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(stored["text"])), "<u2")
    steps = torch.from_numpy(raw.astype(np.float64)).reshape(stored["shape"])
    return steps / steps.sum(1, keepdim=True)
