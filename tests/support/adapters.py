"""A small transformer encoder, and low-rank adapters on it with the names that PEFT gives them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH = 8, 2, 12, 6


class Block(nn.Module):
    """Attention and two linear layers, each beside a shortcut."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        parts = [f(h).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
                 for f in (self.q_proj, self.k_proj, self.v_proj)]  # fmt: skip
        scores = parts[0] @ parts[1].mT / math.sqrt(parts[0].shape[-1])
        mixed = (scores.softmax(-1) @ parts[2]).transpose(-2, -3).flatten(-2)
        x = x + mixed
        return x + self.down(F.gelu(self.up(self.second(x))))


class Encoder(nn.Module):
    """Words to the logits of a sentence."""

    def __init__(self, outputs: int = 2, blocks: int = 1, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.classifier = nn.Linear(width, outputs)

    def forward(self, words: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.words(words)).mean(-2))


class Adapted(nn.Module):
    """Wx + (α/r) B A x: W is frozen, A is drawn and B zero at the start (Hu et al. 2022)."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float = 8.0) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})
        self.scaling = alpha / rank
        self.reset_lora_parameters("default", True)

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool) -> None:
        nn.init.kaiming_uniform_(self.lora_A[adapter_name].weight, a=math.sqrt(5))  # type: ignore[arg-type]
        nn.init.zeros_(self.lora_B[adapter_name].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_B["default"](self.lora_A["default"](x))
        out: Tensor = self.base_layer(x) + self.scaling * low
        return out


def adapted(net: nn.Module, names: tuple[str, ...] = ("q_proj", "v_proj"), rank: int = 2) -> Any:
    """The network frozen, with adapters on the layers of these names."""
    net.requires_grad_(False)
    for path, layer in list(net.named_modules()):
        parent, _, leaf = path.rpartition(".")
        if leaf in names and isinstance(layer, nn.Linear):
            setattr(net.get_submodule(parent), leaf, Adapted(layer, rank))
    return net


def sentences(n: int = 48, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Class 1 where word 1 occurs more often than word 2."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (n, LENGTH), generator=g)
    return words, ((words == 1).sum(1) > (words == 2).sum(1)).long()


def trained(outputs: int = 2, steps: int = 60, blocks: int = 1) -> Encoder:
    """An encoder that knows something: of the same words, another question."""
    torch.default_generator.manual_seed(0)
    net = Encoder(outputs, blocks)
    words, _ = sentences(200, seed=1)
    answer = (words == 3).any(1).long()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(net(words), answer).backward()
        optimiser.step()
    return net
