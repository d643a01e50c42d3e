"""`Draws`, the result of `sample`: MCMC draws in natural space, their status, and a summary table.

`Summary` has one row for each element of a parameter.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa import checks, describe, store
from doxa.data import free_memory
from doxa.density.density import free_layout, natural
from doxa.density.transforms import Shape, Transform
from doxa.errors import StoreError
from doxa.linalg.layout import Params
from doxa.posterior import Status, chains
from doxa.posterior.base import Diagnostics, Record
from doxa.posterior.chains import LEAST_DRAWS, ess_bulk, ess_tail, rhat
from doxa.posterior.saving import check_finite_tensors, read_record

_BLOCK = 4_000_000  # numbers at a time


@dataclass(frozen=True)
class Summary:
    """A table of posterior summaries.

    names: the names of the rows.
    columns: {"mean": [rows], …}, in double precision on the CPU.
    """

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
    """The summary of draws {name: [K, T, *shape]}."""
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
    """The columns of the summary, [E] each, from draws [K, T, E]."""
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


_KIND = "draws"


class Draws(describe.Described, Mapping[str, Tensor]):
    """MCMC draws from a log density: `draws[name]` is [members, draws, *shape], in natural space.

    Attributes
    ----------
    theta : Tensor
        The same draws in free (unconstrained) space, flat, [members, draws, P].
    stats : dict of Tensor
        Statistics of the sampler for each draw, {name: [members, draws]}.
    method : Method
        The sampler with its settings.
    status : Status
        "ok", "not-converged", "diverged" or "stopped"; `.reason` holds the explanation.
    diagnostics : Diagnostics
        R-hat, effective sample sizes, E-BFMI, acceptance, divergences, time, engine.
    history : dict
        Values that were recorded during the run.
    """

    def __init__(
        self,
        theta: Tensor,
        shapes: Mapping[str, Shape],
        transforms: Mapping[str, Transform],
        method: Any,
        record: Record,
    ) -> None:
        self.theta = theta
        self.shapes = dict(shapes)
        self.transforms = dict(transforms)
        self.method = method
        self.record = record

    @cached_property
    def _values(self) -> Params:
        layout = free_layout(self.shapes, self.transforms)
        return natural(layout, self.transforms, self.theta)[0]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(f"no parameter is called {name!r}; there are {list(self.shapes)}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def members(self) -> int:
        return self.theta.shape[0]

    @property
    def count(self) -> int:
        """The number of draws per chain."""
        return self.theta.shape[1]

    @property
    def stats(self) -> dict[str, Tensor]:
        return self.record.stats

    @property
    def status(self) -> Status:
        return self.record.status

    @property
    def diagnostics(self) -> Diagnostics:
        return self.record.diagnostics

    @property
    def history(self) -> dict[str, Any]:
        return self.record.history

    @cached_property
    def _summary(self) -> Summary:
        return summarise(self)

    def summary(self) -> Summary:
        """One row per element: mean, sd, Monte Carlo error, quantiles, effective sizes, R-hat."""
        return self._summary

    def to_arviz(self) -> Any:
        """An arviz DataTree with the groups posterior and sample_stats."""
        return chains.to_arviz(self, self.stats)

    def save(self, path: str | Path) -> None:
        """Write a directory of safetensors and JSON files, atomically and with checksums."""
        stats = {f"stat.{name}": value for name, value in self.stats.items()}
        plain = asdict(replace(self.record, stats={})) | {"status": str(self.status)}
        meta = {
            "kind": _KIND, "method": self.method, "record": plain, "reason": self.status.reason,
            "shapes": self.shapes, "transforms": self.transforms,
        }  # fmt: skip
        store.write_artefact(path, {"theta": self.theta, **stats}, meta)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        draws_budget: int | None = None,
    ) -> Draws:
        """Load what `save` wrote. Draws stay on disk where they take more than `draws_budget` bytes
        (default: a quarter of the free memory)."""
        budget = checks.budget("draws_budget", draws_budget)
        budget = free_memory(device) // 4 if budget is None else budget
        tensors, meta = store.read_artefact(path, budget)
        if meta.get("kind") != _KIND:
            raise StoreError(
                f"{path} holds no draws of a log density; use doxa.load for posteriors"
            )
        fits = sum(v.nbytes for v in tensors.values()) <= budget
        tensors = {k: v.to(device) if fits or k != "theta" else v for k, v in tensors.items()}
        with store.decoding(path):
            check_finite_tensors(tensors)
            stats = {k[5:]: v for k, v in tensors.items() if k.startswith("stat.")}
            record = read_record(meta["record"], meta["reason"], stats)
            new = cls(tensors["theta"], meta["shapes"], meta["transforms"], meta["method"], record)
            size = free_layout(new.shapes, new.transforms).size
            if new.theta.shape[2:] != (size,) or not new.theta.is_floating_point():
                raise StoreError(f"{path}: draws of shape {list(new.theta.shape)}, not of {size}")
        return new

    def described(self) -> describe.Words:
        return describe.draws(self)

    __hash__ = object.__hash__
    __eq__ = object.__eq__
