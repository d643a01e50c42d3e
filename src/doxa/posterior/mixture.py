"""A weighted mixture of posteriors: Bayesian model averaging.

p(y | x, D) = Σ_i p(M_i | D) p(y | x, M_i, D)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.posterior.base import Posterior, register_posterior
from doxa.posterior.saving import from_artefact, to_artefact
from doxa.predictive import Predictive


@register_posterior
class MixturePosterior(Posterior):
    """Parts, and how much each is believed.

    Parameters
    ----------
    parts: posteriors with the same likelihood family and units.
    weights: nonnegative, one a part; normalised here.
    """

    kind = "mixture"

    def __init__(self, parts: Sequence[Posterior], weights: Sequence[float] | Tensor) -> None:
        w = torch.as_tensor(weights, dtype=torch.float64)
        if len(parts) == 0 or w.shape != (len(parts),) or (w < 0).any() or w.sum() <= 0:
            raise MethodError(
                f"a mixture needs one nonnegative weight a part, not all zero; got {w.tolist()} "
                f"for {len(parts)} parts"
            )
        first = parts[0]
        super().__init__(None, first.method, first.base_likelihood, first.scales, first.inputs)
        self.parts = list(parts)
        self.weights = w / w.sum()
        self.record.seed = first.record.seed
        worst = [part.status for part in parts if part.status != "ok"]
        if worst:
            self.record.status = worst[0]

    @property
    def members(self) -> int:
        return len(self.parts)

    def _reference(self) -> Tensor:
        return self.parts[0]._reference()

    def predict(
        self, x: Any, n: int | None = None, seed: int | None = None, keep: str = "samples"
    ) -> Predictive:
        self.sampling(n, seed, keep)
        each = [part.predict(x, n, seed) for part in self.parts]
        return Predictive.mix(each, self.weights)

    def functions(self, x: Any, n: int = 20, seed: int | None = None) -> Tensor:
        seed = self.sampling(n, seed, "samples")
        counts = self._chosen(n, seed)
        return torch.cat(
            [p.functions(x, c, seed) for p, c in zip(self.parts, counts, strict=True) if c]
        )

    def prior_functions(self, x: Any, n: int = 20, seed: int | None = None) -> Tensor:
        """Of the parts, as often as each is believed now."""
        seed = self.sampling(n, seed, "samples")
        counts = self._chosen(n, seed)
        drawn = zip(self.parts, counts, strict=True)
        return torch.cat([part.prior_functions(x, c, seed) for part, c in drawn if c])

    def _chosen(self, n: int, seed: int) -> list[int]:
        """How many of n draws come from each part."""
        chooser = torch.Generator().manual_seed(seed & 0xFFFFFFFF)
        picks = torch.multinomial(self.weights, n, replacement=True, generator=chooser)
        return picks.bincount(minlength=len(self.parts)).tolist()

    def condition(self, x: Any, y: Any) -> MixturePosterior:
        """Each part conditioned, and re-weighted by how well it predicted the new rows."""
        parts = [part.condition(x, y) for part in self.parts]
        gains = [
            (after.log_evidence or 0.0) - (before.log_evidence or 0.0)
            for before, after in zip(self.parts, parts, strict=True)
        ]
        weights = torch.softmax(self.weights.log() + torch.tensor(gains, dtype=torch.float64), 0)
        return MixturePosterior(parts, weights)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"weights": self.weights}
        for i, part in enumerate(self.parts):
            tensors |= {f"part{i}.{k}": v for k, v in to_artefact(part)[0].items()}
        return tensors

    def extra(self) -> dict[str, Any]:
        return {"parts": [to_artefact(part)[1] for part in self.parts]}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> MixturePosterior:
        parts = []
        for i, meta in enumerate(extra["parts"]):
            prefix = f"part{i}."
            own = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            parts.append(from_artefact(own, meta, None))
        return cls(parts, tensors["weights"])
