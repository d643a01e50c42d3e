"""Heads on a frozen trunk: the time of a fit beside loops that are written by hand.

    python -m benchmarks.frozen [--rows cnn,transformer] [--out FILE]

**cnn.** Five linear heads on a frozen convolutional network, 300 steps of Adam in batches of 64, on
one thread. By hand: the features of all rows once, then one batched product per step and fused
Adam. Beside it: a fit of doxa with `requires_grad_(False)`, with `features="frozen"`, and without
the outputs that are computed once. The fits hold out no rows; fits and loops are timed in turns,
and the figures are medians of processor time, which on one thread is the time on an idle machine.

**transformer.** Four heads on a frozen transformer that returns a dataclass, as GPT-2 does: the
time of the first epoch, in which the trunk runs, and of later epochs, as multiples of forward
passes alone over the rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import doxa

HERE = Path(__file__).parent
HEADS, STEPS, BATCH = 5, 300, 64
Row = dict[str, Any]


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(256, 10),
    ).eval()  # fmt: skip


def images(count: int = 2048) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=g), torch.randint(10, (count,), generator=g)


def by_hand(net: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Five heads on features that are computed once."""
    with torch.no_grad():
        phi = torch.cat([net[:-1](part) for part in x.split(128)])
    size = phi.shape[1]
    weight = nn.Parameter(torch.randn(HEADS, size, 10) / size**0.5)
    bias = nn.Parameter(torch.zeros(HEADS, 1, 10))
    adam = torch.optim.Adam([weight, bias], lr=1e-2, fused=True)
    for _ in range(STEPS):
        rows = torch.randint(len(x), (HEADS, BATCH))
        f = torch.baddbmm(bias, phi[rows], weight)
        loss = F.cross_entropy(f.flatten(0, 1), y[rows].flatten(), reduction="sum") / BATCH
        adam.zero_grad()
        loss.backward()
        adam.step()


def fit(net: nn.Module, data: Any, method: Any = "deep-ensemble", **options: Any) -> Any:
    settings = {
        "likelihood": "categorical", "members": HEADS, "steps": STEPS, "batch_size": BATCH,
        "validation": None, "progress": False,
    } | options  # fmt: skip
    return doxa.fit(net, data, method, **settings)


def seconds(call: Callable[[], Any]) -> float:
    """Of this process alone: other work on the machine does not count."""
    began = time.process_time()
    call()
    return time.process_time() - began


def heads(repeats: int = 3) -> Row:
    net, data = cnn(), images()
    frozen = cnn()
    frozen[:-1].requires_grad_(False)
    method = doxa.DeepEnsemble(features="frozen")
    calls: dict[str, Callable[[], Any]] = {
        "by hand": lambda: by_hand(net, *data),
        "requires_grad": lambda: fit(frozen, data),
        "features": lambda: fit(net, data, method, init="given"),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(seconds(call))
    each = {name: statistics.median(values) for name, values in found.items()}
    each["every pass"] = seconds(lambda: fit(frozen, data, trunk_outputs=False))
    ratios = {name: each[name] / each["by hand"] for name in each}
    return {"seconds": each, "ratios": ratios}


@dataclass
class Output:
    logits: Tensor


class Transformer(nn.Module):
    """Tokens [N, T] to the class of the last one; padding (token 0) is on the right."""

    def __init__(self, width: int = 128, layers: int = 4, tokens: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(500, width, padding_idx=0)
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.score = nn.Linear(width, 2, bias=False)

    def forward(self, tokens: Tensor) -> Output:
        given = tokens != 0
        h = self.embed(tokens) + self.position
        h = self.score(self.body(h, src_key_padding_mask=~given))  # [N, T, 2]
        last = given.sum(1) - 1
        return Output(h[torch.arange(len(h), device=h.device), last])


def transformer(count: int = 1024) -> Row:
    torch.manual_seed(0)
    net = Transformer().eval().requires_grad_(False)
    net.score.requires_grad_(True)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 500, (count, 64), generator=g)
    y = torch.randint(2, (count,), generator=g)

    def alone() -> None:
        with torch.no_grad():
            for part in x.split(32):
                net(part)

    epoch = count // 32

    def epochs(number: int) -> float:
        call = lambda: fit(net, (x, y), members=4, steps=number * epoch, batch_size=32)  # noqa: E731
        return seconds(call)

    epochs(1)  # warms up
    forward = statistics.median(seconds(alone) for _ in range(2))
    one, eleven = epochs(1), epochs(11)
    return {"forward": forward, "first": one / forward, "later": (eleven - one) / 10 / forward}


ROWS: dict[str, Callable[[], Row]] = {"cnn": heads, "transformer": transformer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "frozen.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.rows.split(","):
        found[name] = row = ROWS[name]()
        print(name, json.dumps(row, indent=1), flush=True)
        found["machine"] = {"torch": torch.__version__, "processor": platform.machine()}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
