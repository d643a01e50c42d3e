"""A first look at the rows that each member is fitted to, for all members at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.function.evidence import evenly
from doxa.method import Run


class Seen(NamedTuple):
    """x and y of each member, [M, n, ...], in fitted units, and how much its rows count, [M, n] in
    float64; None where all count alike. Members with fewer rows repeat their first, at weight 0."""

    x: Any
    y: Any
    weight: Tensor | None

    def shares(self, like: Tensor) -> Tensor:
        """What each row is of all, [M, n], for tensors like this [M, n, ...]."""
        weight = like.new_ones(like.shape[:2]) if self.weight is None else self.weight.to(like)
        return weight / weight.sum(1, keepdim=True)


def glance(run: Run, most: int | None = None) -> Seen:
    """At all rows that count, or at so many of them, evenly spaced."""
    weight = run.rows.weight
    own = weight is not None and weight.ndim == 2  # then each member has its own, else each split
    who = range(run.size) if own else range(len(run.rows.rows))
    index, counts = [], []
    for m in who:
        rows = run.rows.rows[run.split_of[m] if own else m]
        if weight is not None:
            each = (weight[m] if own else weight).cpu()[rows.cpu()].double()
            rows, each = rows[(each > 0).to(rows.device)], each[each > 0]
        else:
            each = torch.ones(len(rows), dtype=torch.float64)
        some = evenly(len(rows), len(rows) if most is None else most)
        index.append(rows.cpu()[some])
        counts.append(each[some])
    longest = max(map(len, index))
    if weight is None and all(len(rows) == longest for rows in index):
        found, how = torch.stack(index), None
    else:
        found = torch.stack([torch.cat([r, r[:1].expand(longest - len(r))]) for r in index])
        how = torch.stack([torch.cat([c, c.new_zeros(longest - len(c))]) for c in counts])
    if not own:
        found = found[list(run.split_of)]
        how = None if how is None else how[list(run.split_of)]
    x, y = run.rows.take(found, torch.tensor(run.run_of).unsqueeze(1))
    return Seen(x, y, None if how is None else how.to(run.device))
