"""Posteriors that are made of other posteriors.

`MixturePosterior` is a weighted mixture, for Bayesian model averaging:

    p(y | x, D) = Σ_i p(M_i | D) p(y | x, M_i, D)

`TransformedPosterior` applies a transform to predictions, for recalibration and conformal
intervals:

    predict(x) = transform(base.predict(x))

Both save, load and predict like any other posterior. Functions and weights of a transformed
posterior are those of its base; the transform does not change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from doxa.data.fitted_rows import watched_inputs
from doxa.errors import DataError, MethodError, ModelError, StoreError
from doxa.linalg.layout import Params
from doxa.posterior.base import Posterior, PredictiveTransform, register_posterior
from doxa.posterior.saving import from_artefact, to_artefact
from doxa.predictive import Predictive
from doxa.predictive.blend import part_seed


@register_posterior
class MixturePosterior(Posterior):
    """A weighted mixture of posteriors.

    Parameters
    ----------
    parts : sequence of Posterior
        Posteriors with the same likelihood family and units.
    weights : sequence of float, or Tensor
        One nonnegative weight per part; they are normalised here.
    """

    kind = "mixture"

    def __init__(self, parts: Sequence[Posterior], weights: Sequence[float] | Tensor) -> None:
        w = torch.as_tensor(weights, dtype=torch.float64)
        if len(parts) == 0 or w.shape != (len(parts),) or (w < 0).any() or w.sum() <= 0:
            raise MethodError(
                f"a mixture needs one nonnegative weight per part, not all zero; got {w.tolist()} "
                f"for {len(parts)} parts"
            )
        first = parts[0]
        super().__init__(None, first.method, first.base_likelihood, first.scales, first.inputs)
        self.parts = list(parts)
        self.weights = w / w.sum()
        self.record.seed, self.columns = first.record.seed, first.columns
        if all(part.scalar_targets == first.scalar_targets for part in parts):
            self.scalar_targets = first.scalar_targets
        for part in parts:
            self.record.status = self.record.status.or_before(part.status)

    def check_restored(self) -> None:
        super().check_restored()
        with contextlib.suppress(DataError, ModelError):  # x that are no numbers
            self.shadow().check_two_rows()

    def shadow(self) -> MixturePosterior:
        new = super().shadow()
        new.parts = [part.shadow() for part in self.parts]
        return new

    @property
    def members(self) -> int:
        return len(self.parts)

    def _reference(self) -> Tensor:
        return self.parts[0]._reference()

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """n is the total number of samples, split over the parts by their weights."""
        seed, x = self.sampling(n, seed, keep), self.ordered(x)
        counts = [None] * len(self.parts) if n is None else _split(n, self.weights)
        used = [k for k, count in enumerate(counts) if count != 0]
        each = [self.parts[k]._predict(x, counts[k], part_seed(seed, k), keep) for k in used]
        return Predictive.mix(each, self.weights[used])

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Draws from the parts, in proportion to their weights."""
        return self._drawn("_draw_functions", x, n, seed)

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Prior draws from the parts, in proportion to their posterior weights."""
        return self._drawn("_draw_prior_functions", x, n, seed)

    def _drawn(self, name: str, x: Any, n: int, seed: int | None) -> Tensor:
        """n equally weighted draws, from parts that are chosen by their weights."""
        seed, x = self.sampling(n, seed, "samples"), self.ordered(x)
        chooser = torch.Generator().manual_seed(seed & 0xFFFFFFFF)
        picks = torch.multinomial(self.weights, n, replacement=True, generator=chooser)
        counts = enumerate(picks.bincount(minlength=len(self.parts)).tolist())
        return torch.cat(
            [getattr(self.parts[k], name)(x, c, part_seed(seed, k)) for k, c in counts if c]
        )

    def condition(self, x: Any, y: Any) -> MixturePosterior:
        """Condition each part on the new rows, and re-weight it by its predictive density of
        them."""
        x = self.ordered(x)
        parts = [part.condition(x, y) for part in self.parts]
        gains = [
            (after.log_evidence or 0.0) - (before.log_evidence or 0.0)
            for before, after in zip(self.parts, parts, strict=True)
        ]
        weights = torch.softmax(self.weights.log() + torch.tensor(gains, dtype=torch.float64), 0)
        return MixturePosterior(parts, weights)

    def count_fitted(self, x: Any, y: Any) -> int:
        """The largest count of any part."""
        return max(part.count_fitted(x, y) for part in self.parts)

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


def _split(n: int, weights: Tensor) -> list[int]:
    """Split n samples over parts, as near to n w as whole numbers allow.

    Every part of positive weight has at least one sample. Where n is smaller than the number of
    these parts, those of the largest weights have one each.
    """
    order = weights.argsort(descending=True, stable=True)[: int((weights > 0).sum())][:n]
    counts = torch.zeros(len(weights), dtype=torch.long)
    counts[order] = 1 + ((n - len(order)) * weights[order]).long()
    for _ in range(n - int(counts.sum())):
        counts[(n * weights - counts).argmax()] += 1
    return counts.tolist()


@register_posterior
class TransformedPosterior(Posterior):
    """A base posterior, and a transform of its predictions."""

    kind = "transformed"
    transform: PredictiveTransform

    def __init__(self, base: Posterior, transform: PredictiveTransform) -> None:
        super().__init__(
            base.model, base.method, base.base_likelihood, base.scales, base.inputs, base.ids
        )
        self.base = base
        self.transform = transform
        self.record = replace(base.record, certificate=None)  # of the predictions of the base
        self.columns, found, shape = base.columns, base.input_reference, base.inputs
        if found is not None and isinstance(shape, list) and len(shape) == 1:
            columns = len(watched_inputs(shape[0]))  # the others are of predictions of the base
            self.input_reference = found[:, :columns].clone()
        self.scalar_targets = base.scalar_targets
        self.log_evidence, self.elbo = base.log_evidence, base.elbo

    def check_restored(self) -> None:
        if not isinstance(self.transform, PredictiveTransform):
            raise StoreError(f"a {type(self.transform).__name__} is not a transform of predictions")
        super().check_restored()
        with contextlib.suppress(DataError, ModelError):  # x that are no numbers
            self.shadow().check_two_rows()

    def shadow(self) -> TransformedPosterior:
        new = super().shadow()
        new.base = self.base.shadow()
        return new

    @property
    def members(self) -> int:
        return self.base.members

    def _reference(self) -> Tensor:
        return self.base._reference()

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        x = self.ordered(x)
        return self.transform.at(self.base._predict(x, n, seed, keep), x)

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        return self.base._draw_functions(x, n, seed)

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        return self.base._draw_prior_functions(x, n, seed)

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        return self.base.draw(n, seed)

    def features(self, x: Any) -> Tensor:
        return self.base.features(x)

    def condition(self, x: Any, y: Any) -> TransformedPosterior:
        return TransformedPosterior(self.base.condition(x, y), self.transform)

    def count_fitted(self, x: Any, y: Any) -> int:
        return self.base.count_fitted(x, y)

    def _fingerprint(self) -> str:
        return self.base._fingerprint()

    def to_arviz(self) -> Any:
        return self.base.to_arviz()

    def tensors(self) -> dict[str, Tensor]:
        return {f"base.{k}": v for k, v in to_artefact(self.base)[0].items()}

    def extra(self) -> dict[str, Any]:
        return {"base": to_artefact(self.base)[1], "transform": self.transform}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> TransformedPosterior:
        own = {k.removeprefix("base."): v for k, v in tensors.items() if k.startswith("base.")}
        net = None if common["model"] is None else common["model"].net
        return cls(from_artefact(own, extra["base"], net), extra["transform"])
