"""Draws in a table, one row an element of a parameter."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.posterior.chains import LEAST_DRAWS, ess_bulk, ess_tail, rhat

_BLOCK = 4_000_000  # numbers at a time


@dataclass(frozen=True)
class Summary:
    """names: of the rows. columns: {"mean": [rows], …}, in double precision on the CPU."""

    names: list[str]
    columns: dict[str, Tensor]

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self.names)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """{row: {column: value}}"""
        values = {column: value.tolist() for column, value in self.columns.items()}
        return {
            name: {column: values[column][i] for column in values}
            for i, name in enumerate(self.names)
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=120, no_color=True)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        for column in self.columns:
            table.add_column(column, justify="right", no_wrap=True)
        whole = ("ess_bulk", "ess_tail")
        for name, row in self.to_dict().items():
            cells = [f"{v:.0f}" if c in whole else f"{v:.4g}" for c, v in row.items()]
            table.add_row(name, *cells)
        return table


def summarise(draws: Mapping[str, Tensor]) -> Summary:
    """Of {name: [K, T, *shape]}."""
    names: list[str] = []
    parts: dict[str, list[Tensor]] = {}
    for name, value in draws.items():
        shape = value.shape[2:]
        labels = itertools.product(*(range(n) for n in shape))
        names += [f"{name}[{','.join(map(str, i))}]" if i else name for i in labels]
        flat = value.detach().flatten(2) if shape else value.detach().unsqueeze(2)  # [K, T, E]
        block = max(1, _BLOCK // (flat.shape[0] * flat.shape[1]))
        for part in flat.split(block, 2):
            for column, figures in _columns(part.double()).items():
                parts.setdefault(column, []).append(figures.cpu())
    return Summary(names, {column: torch.cat(each) for column, each in parts.items()})


def _columns(values: Tensor) -> dict[str, Tensor]:
    """[K, T, E] to figures [E]."""
    flat = values.flatten(0, 1)
    nothing = torch.full_like(flat[0], torch.nan)
    judged = values.shape[1] >= LEAST_DRAWS and bool(torch.isfinite(values).all())
    bulk = ess_bulk(values) if judged else nothing
    std = flat.std(0) if len(flat) > 1 else nothing
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=flat.dtype, device=flat.device)
    low, median, high = torch.quantile(flat, levels, dim=0)
    return {
        "mean": flat.mean(0), "sd": std, "mcse": std / bulk.sqrt(), "5%": low, "50%": median,
        "95%": high, "ess_bulk": bulk, "ess_tail": ess_tail(values) if judged else nothing,
        "rhat": rhat(values) if judged else nothing,
    }  # fmt: skip
