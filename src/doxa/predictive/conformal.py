"""Predictives with a guaranteed interval or set of classes; everything else is the base's.

Conformal prediction says nothing about the distribution of y: it says how wide an interval, or how
large a set, must be to hold y with the level it was calibrated for. So there is one level.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError, Unavailable
from doxa.predictive.form import Form


class Conformal(Form):
    """A form as it is, at one level."""

    def __init__(self, base: Form, level: float) -> None:
        self.base, self.level = base, level
        self.likelihood = base.likelihood

    @property
    def splits(self) -> bool:
        return self.base.splits

    @property
    def mean(self) -> Tensor:
        return self.base.mean

    @property
    def aleatoric(self) -> Tensor:
        return self.base.aleatoric

    @property
    def epistemic(self) -> Tensor:
        return self.base.epistemic

    @property
    def variance(self) -> Tensor:
        return self.base.variance

    @property
    def std(self) -> Tensor:
        return self.base.std

    @property
    def expected_entropy(self) -> Tensor:
        return self.base.expected_entropy

    @property
    def marginal_entropy(self) -> Tensor:
        return self.base.marginal_entropy

    @property
    def mutual_information(self) -> Tensor:
        return self.base.mutual_information

    @property
    def samples(self) -> Tensor:
        return self.base.samples

    @property
    def weights(self) -> Tensor:
        return self.base.weights

    def votes(self) -> Tensor:
        return self.base.votes()

    def class_table(self) -> Tensor:
        return self.base.class_table()

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.base.normals()

    def targets(self, y: Any) -> Tensor:
        return self.base.targets(y)

    def log_prob(self, y: Tensor) -> Tensor:
        return self.base.log_prob(y)

    def cdf(self, y: Tensor) -> Tensor:
        return self.base.cdf(y)

    def quantile(self, level: float) -> Tensor:
        return self.base.quantile(level)

    def sample(self, n: int, seed: int) -> Tensor:
        return self.base.sample(n, seed)

    def check_level(self, level: float | None) -> None:
        if level is not None and abs(level - self.level) > 1e-9:
            raise Unavailable(
                f"this predictive was calibrated for level {self.level:g} and knows no other; it "
                f"was asked for {level:g}: leave the level out, or calibrate for that one"
            )


class ConformalInterval(Conformal):
    """`bounds` gives (low, high) [N, *event] when they are asked for."""

    def __init__(
        self, base: Form, level: float, bounds: Callable[[], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(base, level)
        self._compute = bounds

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        low, high = self._compute()
        if bool((torch.isnan(low) | torch.isnan(high)).any()):
            raise DataError("the predictions are not numbers (NaN): there is no interval to give")
        return low, high

    def interval(self, level: float | None) -> tuple[Tensor, Tensor]:
        self.check_level(level)
        return self._bounds


class ConformalSet(Conformal):
    """`chosen` gives the classes, bool [N, C], when they are asked for."""

    def __init__(self, base: Form, level: float, chosen: Callable[[], Tensor]) -> None:
        super().__init__(base, level)
        self._compute = chosen

    @cached_property
    def _chosen(self) -> Tensor:
        return self._compute()

    def prediction_set(self, level: float | None) -> Tensor:
        self.check_level(level)
        return self._chosen
