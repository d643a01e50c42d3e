"""Class probabilities as a table of their own, beside the form that they were made from.

A table is no average over draws, so that the split of its uncertainty does not follow from it; the
base's proportions are kept,

    I' = H[q] · I / H[p̄],    epistemic' = q (1 - q) · epistemic / variance,

with which the parts still add up and 0 <= I' <= H[q]: how much is unknown is the table's to say,
where the lack of knowledge comes from is the base's.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from doxa.likelihoods import Bernoulli, Categorical
from doxa.predictive.form import Form, check_rows


class ClassTable(Form):
    """Log-probabilities [N, C, *site] in float64 (no and yes on axis 1 for Bernoulli), and the
    form they were made from. Labels of one row are independent."""

    def __init__(self, base: Form, log_table: Tensor) -> None:
        self.base, self.log_table = base, log_table
        self.likelihood = base.likelihood

    @property
    def splits(self) -> bool:
        return self.base.splits

    @property
    def mean(self) -> Tensor:
        return self._mean

    @cached_property
    def _mean(self) -> Tensor:
        table = self.log_table.exp()
        chosen = table[:, 1] if isinstance(self.likelihood, Bernoulli) else table
        return chosen.to(self.base.mean.dtype)

    def class_table(self) -> Tensor:
        return self.log_table.exp()

    @property
    def aleatoric(self) -> Tensor:
        return self.mean * (1.0 - self.mean) - self.epistemic

    @property
    def epistemic(self) -> Tensor:
        return self.mean * (1.0 - self.mean) * share(self.base.epistemic, self.base.variance)

    @property
    def expected_entropy(self) -> Tensor:
        return self.marginal_entropy * (1.0 - self._known_share)

    @property
    def mutual_information(self) -> Tensor:
        return self.marginal_entropy * self._known_share

    @cached_property
    def _known_share(self) -> Tensor:
        return share(self.base.mutual_information, self.base.marginal_entropy)

    def targets(self, y: Any) -> Tensor:
        ready = self.likelihood.prepare_targets(y, tuple(self.mean.shape[1:]))
        return check_rows(ready.to(self.log_table.device), self.mean.shape[0])

    def log_prob(self, y: Tensor) -> Tensor:
        each = self.by_label(y)
        return each.reshape(len(each), math.prod(each.shape[1:])).sum(1).to(self.mean.dtype)

    def by_label(self, y: Tensor) -> Tensor:
        """log p of each label by itself, in the shape of y; 0 where one is ignored."""
        index, counted = y.long(), torch.ones_like(y, dtype=torch.bool)
        if isinstance(self.likelihood, Categorical) and self.likelihood.ignore_index is not None:
            counted = index != self.likelihood.ignore_index
            index = torch.where(counted, index, 0)
        each = self.log_table.gather(1, index.unsqueeze(1)).squeeze(1)
        return torch.where(counted, each, 0.0)

    def labels(self, log_table: Tensor, n: int, source: Generator) -> Tensor:
        """n labels of each row by itself, with these probabilities: [n, N, *event]."""
        binary = isinstance(self.likelihood, Bernoulli)
        logits = log_table[:, 1] - log_table[:, 0] if binary else log_table
        drawn = self.likelihood.sample(logits.expand(n, *logits.shape), {}, source, 1)
        return drawn.to(self.mean.dtype) if drawn.is_floating_point() else drawn


def share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole in [0, 1]; 0 where there is nothing to share."""
    return torch.where(whole > 0, part / whole, 0.0).clamp(0.0, 1.0)
