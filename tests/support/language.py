"""Small language models with the inputs and outputs of those of transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from adapters import Block, adapted
from torch import Tensor, nn

WORDS, LENGTH = 7, 6


@dataclass
class Output:
    """As a transformer answers: what was not asked for is None."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class Markov(nn.Module):
    """The logits of the next token are a row of a table: those of the token itself."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.table = nn.Embedding(words, words)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        return Output(logits=self.table(input_ids))


class Writer(nn.Module):
    """A causal network: each position sees the mean of the tokens up to it. Padding is not seen."""

    def __init__(self, words: int = WORDS, width: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.up = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, words, bias=False)
        if tied:
            self.lm_head.weight = self.words.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        h = self.words(input_ids)
        seen = torch.ones_like(h[..., :1])
        if attention_mask is not None:
            seen = attention_mask.unsqueeze(-1).to(h.dtype)
        h = (h * seen).cumsum(-2) / seen.cumsum(-2).clamp_min(1.0)
        return Output(logits=self.lm_head(torch.tanh(self.up(h))))


class Tagger(nn.Module):
    """One class of each token, [N, T, C], or of the sequence, [N, C]."""

    def __init__(self, classes: int = 3, tokens: bool = True) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, 8), Block(8)
        self.classifier, self.tokens = nn.Linear(8, classes), tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
        h = self.block(self.words(input_ids) * attention_mask.unsqueeze(-1))
        return Output(logits=self.classifier(h if self.tokens else h.mean(-2)))


def sentences(n: int = 16, seed: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    """Tokens 1 … of uneven length, padded with 0 on the right; the first row has full length."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (n, length), generator=g)
    lengths = torch.randint(3, length + 1, (n, 1), generator=g)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def with_adapters(net: nn.Module) -> nn.Module:
    """The network frozen, with low-rank adapters on its layer "up"."""
    return adapted(net, ("up",), rank=2)
