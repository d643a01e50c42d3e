"""Weights as a flow of standard normals, one by one, in closed form (Johnson, 1949: "SU").

    w = (s/t) sinh(t ε),  ε ~ N(0, 1);    ε = asinh(r)/t with r = t w/s

    log p(w) = −ε²/2 − log s − log(2π)/2 − log(1 + r²)/2

t → 0 is N(0, s²); the larger t, the heavier the tails: most weights small, a few that are large.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from doxa.priors.families import HALF_LOG_2PI, Family, Values, normal


class FlowFamily(Family):
    """The density of w in the docstring above."""

    def derive(self, *, scale: Tensor, tail: Tensor) -> Values:  # type: ignore[override]
        norm = -(scale.log() + HALF_LOG_2PI).sum(-1)
        return {"scale": scale, "tail": tail, "slope": tail / scale, "norm": norm}

    def _back(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ε, r and 1/(1 + r²)."""
        r = x * self.at["slope"]
        return torch.asinh(r) / self.at["tail"], r, 1.0 / (1.0 + r.square())

    def log_prob(self, x: Tensor) -> Tensor:
        eps, r, _ = self._back(x)
        return self.at["norm"] - 0.5 * (eps.square() + torch.log1p(r.square())).sum(-1)

    def score(self, x: Tensor) -> Tensor:
        eps, r, share = self._back(x)
        return -(eps * share.sqrt() + self.at["tail"] * r * share) / self.at["scale"]

    def curvature(self, x: Tensor) -> Tensor:
        eps, r, share = self._back(x)
        tail = self.at["tail"]
        turned = 1.0 - eps * tail * r * share.sqrt() + tail.square() * (1.0 - r.square()) * share
        return turned * share / self.at["scale"].square()

    def sample(self, n: int, generator: Generator) -> Tensor:
        scale, tail = self.at["scale"], self.at["tail"]
        return scale * torch.sinh(tail * normal(n, scale, generator)) / tail
