"""What an estimator says of the expected information gain: values, errors, and their kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EXACT, ESTIMATE, LOWER, UPPER = "exact", "estimate", "lower bound", "upper bound"


@dataclass(frozen=True)
class EIG:
    """Expected information gain of each design, in nats.

    Attributes
    ----------
    designs: [D, *shape]. values: [D]. errors: [D], standard errors over draws; of "exact" the error
        of the quadrature, 0 where θ is discrete.
    kind: "exact", "estimate", or what the values are in expectation: "lower bound",
        "upper bound".
    bias: [D], how far above the truth an upper bound is expected to be, where that can be told: to
        first order, or where contrasts are too few for that, the distance to the lower bound on the
        same draws.
    note: what is known of the bias, in words.
    settings: the numbers of draws.
    """

    designs: Tensor
    values: Tensor
    errors: Tensor
    kind: str
    estimator: str
    note: str
    settings: dict[str, Any]
    bias: Tensor | None = None

    @property
    def best(self) -> int:
        """The row of the largest value."""
        return int(self.values.argmax())

    @property
    def best_design(self) -> Tensor:
        return self.designs[self.best].detach()

    def __str__(self) -> str:
        rows = zip(self.designs.tolist(), self.values.tolist(), self.errors.tolist(), strict=True)
        lines = [f"{design!s:>16}  {value:9.4f} ± {error:.4f}" for design, value, error in rows]
        return "\n".join([f"EIG in nats, {self.estimator} ({self.kind}); {self.note}", *lines])


def from_groups(
    terms: Tensor, designs: Tensor, kind: str, estimator: str, note: str,
    settings: dict[str, Any], bias: Tensor | None = None,
) -> EIG:  # fmt: skip
    """Of terms [G, n, D], whose groups share nothing: the error is that of the groups' means, so
    that draws shared within a group are counted."""
    means = terms.mean(1)  # [G, D]
    spread = means.detach().std(0) if len(means) > 1 else torch.full_like(means[0], torch.nan)
    errors = spread / len(means) ** 0.5
    return EIG(designs, means.mean(0), errors, kind, estimator, note, settings, bias)
