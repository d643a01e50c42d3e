"""What likelihoods of classes share: outputs are logits, divided by a temperature T.

T is 1 unless it is given, or rows that a fit left out ask for another (Guo, Pleiss, Sun and
Weinberger 2017, whose rows are held out of everything). It is where they are likeliest under

    log T ~ N(0, 0.35²)

and log T is added for each member. Training was stopped where its part of these very rows is
predicted best, which makes a network look better than it is: the slope of their log-likelihood
along log T is below that of new rows, by about 1 a member. On 28 tables an ensemble of five lacked
4.5 on the mean where it had fewer than 500 rows and 6.5 where it had more; one network 1.5 and 2.0,
dropout 1.2 and 1.5, `mean-field` 0.1 and 0.6.

T stays 1 unless they gain, that slope counted: a gain of k of its standard errors is a log T of 2k
of its own. Being too sure has no bound to what it costs: half of one is enough for T > 1, T < 1
needs two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from doxa.errors import ModelError
from doxa.likelihoods.base import LeftOut, Likelihood, Theta, positive
from doxa.likelihoods.left_out import clear, likeliest, mixed

_MOST = math.log(5.0)  # of |log T|
_SPREAD = 0.35  # of log T, beforehand
_SLOPE = 1.0  # that rows lack, of each member that was stopped on its part of them
_ERRORS = {True: 0.25, False: 1.0}  # of the gain, that T > 1 and T < 1 must have


@dataclass(frozen=True)
class Classes(Likelihood):
    """Classes: each output is a logit.

    Parameters
    ----------
    temperature
        A number, or None: 1 in training, and afterwards what the rows left out say.
    """

    discrete: ClassVar[bool] = True
    classifies: ClassVar[bool] = True

    temperature: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        given = positive("temperature", self.temperature)
        if isinstance(given, tuple):
            raise ModelError(f"temperature must be one number, got {self.temperature!r}")
        object.__setattr__(self, "temperature", given)

    @property
    def asks_left_out(self) -> bool:
        return self.temperature is None and not self.tempered

    def left_out(
        self, f: Tensor, y: Tensor, theta: Theta, weight: Tensor, stopped: int = 1
    ) -> LeftOut | None:
        """The temperature that they ask for."""

        def score(log_t: float) -> Tensor:
            return mixed(replace(self, temperature=math.exp(log_t)).log_prob(f, y, theta, 1))

        slope = _SLOPE * stopped
        log_t = likeliest(score, weight, _MOST, _SPREAD, slope)
        lacking = slope * log_t / weight.sum()
        if not clear(score(log_t) - score(0.0) + lacking, weight, _ERRORS[log_t > 0]):
            return None
        t = math.exp(log_t)
        return LeftOut(replace(self, temperature=t), f"{self.name} at temperature {t:.3g}")

    def plain(self) -> Likelihood:
        return self if self.temperature is None else replace(self, temperature=None)

    def location(self, f: Tensor, lead: int = 0) -> Tensor:
        return f if self.temperature is None else f / self.temperature

    def location_variance(self, variance: Tensor, lead: int = 0) -> Tensor:
        return variance if self.temperature is None else variance / self.temperature**2
