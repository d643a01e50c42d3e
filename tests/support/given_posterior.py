"""A posterior whose inputs are its outputs: any predictions, with no network to train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa.likelihoods import Likelihood
from doxa.likelihoods import likelihood as resolve
from doxa.posterior import Posterior
from doxa.predictive import Moments, Predictive


class GivenPosterior(Posterior):
    """x [N, S, *output] are the network's outputs at each row, for each draw."""

    kind = "test.given"

    def __init__(self, likelihood: str | Likelihood) -> None:
        super().__init__(None, None, resolve(likelihood))

    @property
    def members(self) -> int:
        return 1

    def _reference(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        f = torch.as_tensor(x).movedim(1, 0)
        if keep == "samples":
            return Predictive(f, self.base_likelihood)
        moments = Moments(self.base_likelihood)
        moments.update(f)
        return moments.result()

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GivenPosterior:
        return cls(common["likelihood"])
