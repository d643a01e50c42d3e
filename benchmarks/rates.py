"""The default learning rate on six kinds of networks, beside 0.01 with a cosine schedule.

    DOXA_DATA=... python -m benchmarks.rates [--steps 60] [--rows 512] [--only resnet-20,mlp]
                                             [--method map]

Each network has 100,000 weights or more, and is trained by a method on a part of CIFAR-10 at
16 × 16 pixels, in batches of 32. The table has the mean training loss at the end, in nats per row:
with ten classes, a constant prediction has 2.303. A loss above that is one of a network that
diverged.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import doxa
from doxa.optim import rate_for


def block(inside: int, outside: int, stride: int, bottleneck: bool) -> nn.Module:
    """The branch of a residual block."""
    if not bottleneck:
        shapes = [(inside, outside, 3, stride), (outside, outside, 3, 1)]
    else:
        middle = outside // 4
        shapes = [(inside, middle, 1, 1), (middle, middle, 3, stride), (middle, outside, 1, 1)]
    layers: list[nn.Module] = []
    for own, more, size, step in shapes:
        layers += [nn.Conv2d(own, more, size, step, size // 2, bias=False), nn.BatchNorm2d(more)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.branch = block(inside, outside, stride, bottleneck)
        self.short = nn.Identity() if inside == outside and stride == 1 else nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.short(x))


def resnet(widths: list[int], depth: int, bottleneck: bool) -> nn.Module:
    first = widths[0] // (4 if bottleneck else 1)
    layers: list[nn.Module] = [
        nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()
    ]  # fmt: skip
    inside = first
    for i, width in enumerate(widths):
        for j in range(depth):
            layers.append(Residual(inside, width, 2 if i and not j else 1, bottleneck))
            inside = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


class Conv1D(nn.Module):
    """The linear layer of GPT-2, with its weight transposed, and no `reset_parameters`."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = Conv1D(3 * width, width), Conv1D(width, width)
        self.wide, self.narrow = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))  # [B, heads, T, d]
        far = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        score = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(far, -1e9)
        x = x + self.out((score.softmax(-1) @ v).transpose(-3, -2).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class GPT(nn.Module):
    """A decoder over 64 grey levels, which predicts the class at the last of them."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(16, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        grey = F.avg_pool2d(x.mean(1, keepdim=True), 2).flatten(1)  # [B, 64], about N(0, 1)
        levels = (4.0 * grey + 8.0).long().clamp(0, 15)
        place = torch.arange(64, device=x.device)
        return self.head(self.norm(self.blocks(self.token(levels) + self.place(place)))[:, -1])


class Patches(nn.Module):
    """An encoder of 16 patches: attention, or none (an MLP-Mixer)."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, 16, width))
        one = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.blocks(tokens).mean(1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def mlp(width: int = 1024, depth: int = 5) -> nn.Module:
    sizes = [768, *(width,) * depth]
    layers: list[nn.Module] = [nn.Flatten()]
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet-20": lambda: resnet([16, 32, 64], 3, bottleneck=False),
    "cnn": cnn,
    "bottleneck resnet": lambda: resnet([64, 128, 256], 2, bottleneck=True),
    "transformer": Patches,
    "gpt": GPT,
    "mlp": mlp,
    "small mlp": lambda: mlp(128, 2),
}


def data(rows: int) -> tuple[Tensor, Tensor]:
    folder = Path(os.environ["DOXA_DATA"])
    with np.load(folder / "cifar10_subset.npz", allow_pickle=False) as found:
        images, classes = found["x_train"], found["y_train"]
    some = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:rows]
    x = torch.from_numpy(images)[some].permute(0, 3, 1, 2).float() / 255.0
    x = (F.avg_pool2d(x, 2) - 0.47) / 0.25
    return x, torch.from_numpy(classes)[some].long()


def trained(
    net: nn.Module, x: Tensor, y: Tensor, steps: int, method: str = "map", **options: float | str
) -> float:
    """The mean loss on the training rows after a fit, in nats per row."""
    posterior = doxa.fit(
        net, (x, y), method, steps=steps, batch_size=32, likelihood="categorical", progress=False,
        validation=None, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return float(-posterior.predict(x).log_prob(y).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--method", default="map")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y = data(arguments.rows)
    for name in arguments.only.split(","):
        torch.manual_seed(0)
        net = NETWORKS[name]()
        size = sum(p.numel() for p in net.parameters())
        method, steps = arguments.method, arguments.steps
        factor, schedule = rate_for(net)
        usual = doxa.get_method(method).default_rate
        before = trained(net, x, y, steps, method, lr=usual, schedule="cosine")
        after = trained(net, x, y, steps, method, lr=factor * usual, schedule=schedule)
        print(
            f"{method:12s} {name:18s} {size:9,} weights: {before:8.3f} at {usual:g}, "
            f"{after:6.3f} at {factor * usual:g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
