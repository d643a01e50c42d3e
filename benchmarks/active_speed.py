"""Time to score a pool and to choose a batch, compared with loops over samples.

    python -m benchmarks.active_speed --images 1000 --samples 100
    python -m benchmarks.active_speed --device cuda --images 60000 --samples 100 --out speed.json

A pool of 28 × 28 images is scored by BALD under MC dropout with the network of Gal et al. (2017),
two ways on the same weights: `doxa.decide.select`, and one forward pass for each sample and batch
of images with dropout on, as libraries that repeat the input do. BatchBALD is timed for ten rows
out of 2,000 with 100 samples of 10 classes; with batchbald_redux installed, on so many rows of them
(--peer-rows) by that too, whose time grows with the rows in proportion.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import doxa


def net() -> nn.Sequential:
    """Two convolutions of 32 filters of 4 × 4, dropout, 128 hidden units, dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4), nn.ReLU(), nn.Conv2d(32, 32, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(32 * 11 * 11, 128), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def loop_over_samples(model: nn.Module, x: Tensor, samples: int, batch: int = 100) -> Tensor:
    """BALD, one pass per sample."""
    model.train()
    scores = []
    with torch.no_grad():
        for start in range(0, len(x), batch):
            some = x[start : start + batch]
            probs = torch.stack([model(some).softmax(1) for _ in range(samples)])
            mean = probs.mean(0)
            inside = torch.special.entr(probs).sum(2).mean(0)
            scores.append(torch.special.entr(mean).sum(1) - inside)
    return torch.cat(scores)


def timed(work: Any, device: str) -> tuple[float, Any]:
    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    found = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, found


def pool_speed(images: int, samples: int, device: str, looped: int) -> dict[str, float]:
    source = torch.Generator().manual_seed(0)
    x = torch.rand(images, 1, 28, 28, generator=source).to(device)
    y = torch.arange(200) % 10
    model = net().to(device)
    posterior = doxa.fit(
        model, (x[:200], y), "mc-dropout", likelihood="categorical", steps=5, validation=None,
        progress=False,
    )  # fmt: skip
    doxa.decide.select(posterior, x[:200], n=samples)  # warm
    ours, _ = timed(lambda: doxa.decide.select(posterior, x, n=samples), device)
    some = x[:looped]
    loop, _ = timed(lambda: loop_over_samples(model, some, samples), device)
    loop *= images / len(some)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "images": images, "samples": samples, "ours_s": ours, "loop_s": loop,
        "ratio": loop / ours, "looped_images": len(some), "peak_gib": peak,
    }  # fmt: skip


def batch_speed(rows: int, device: str, peer_rows: int) -> dict[str, float]:
    source = torch.Generator().manual_seed(0)
    own = torch.randn(100, rows, 10, generator=source) * 0.5
    probs = (own + 2.5 * torch.randn(1, rows, 10, generator=source)).softmax(2).to(device)
    p = doxa.Predictive.from_probs(probs)
    seconds, _ = timed(lambda: doxa.decide.batch_bald(p, 10), device)
    found = {"rows": rows, "ours_s": seconds}
    if peer_rows:
        from batchbald_redux import batchbald

        table = probs[:, :peer_rows].log().permute(1, 0, 2).double().cpu()
        peer, _ = timed(lambda: batchbald.get_batchbald_batch(table, 10, 10_000), "cpu")
        scaled = peer * rows / peer_rows
        found |= {"peer_rows": peer_rows, "peer_s": scaled, "ratio": scaled / seconds}
    return found


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--images", type=int, default=1000)
    ask.add_argument("--samples", type=int, default=100)
    ask.add_argument("--looped", type=int, default=200, help="images for the loop, then scaled")
    ask.add_argument("--rows", type=int, default=2000)
    ask.add_argument("--peer-rows", type=int, default=0)
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--out", type=Path)
    asked = ask.parse_args()
    found = {
        "pool": pool_speed(asked.images, asked.samples, asked.device, asked.looped),
        "batch": batch_speed(asked.rows, asked.device, asked.peer_rows),
        "device": asked.device,
    }
    print(json.dumps(found, indent=2))
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
