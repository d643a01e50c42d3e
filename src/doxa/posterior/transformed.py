"""A posterior whose predictions pass through a transform: recalibration, conformal intervals.

    predict(x) = transform(base.predict(x))

It is a posterior like any other: it saves, loads and predicts. Functions and weights are those of
the base, which the transform does not touch.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from doxa.errors import DataError, ModelError, StoreError
from doxa.linalg.layout import Params
from doxa.posterior.base import Posterior
from doxa.posterior.kinds import register_posterior
from doxa.posterior.saving import from_artefact, to_artefact
from doxa.predictive import Predictive


class PredictiveTransform(ABC):
    """From one predictive to another. Subclasses are frozen dataclasses known to the store."""

    @abstractmethod
    def __call__(self, p: Predictive) -> Predictive: ...

    def at(self, p: Predictive, x: Any) -> Predictive:
        """For a transform that also looks at the inputs, as given by the caller."""
        return self(p)


@register_posterior
class TransformedPosterior(Posterior):
    """A base posterior and what is done to its predictions."""

    kind = "transformed"

    def __init__(self, base: Posterior, transform: PredictiveTransform) -> None:
        super().__init__(
            base.model, base.method, base.base_likelihood, base.scales, base.inputs, base.ids
        )
        self.base = base
        self.transform = transform
        self.record, self.columns = base.record, base.columns
        self.scalar_targets = base.scalar_targets
        self.log_evidence, self.elbo = base.log_evidence, base.elbo

    def check_restored(self) -> None:
        if not isinstance(self.transform, PredictiveTransform):
            raise StoreError(f"a {type(self.transform).__name__} is no transform of predictions")
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
