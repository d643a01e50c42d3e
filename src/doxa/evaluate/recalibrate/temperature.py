"""Temperature scaling: one number that sharpens or flattens all probabilities.

    q = softmax(log p̄ / T),    T = argmin_T  -Σ_n log q_n(y_n)

Guo, Pleiss, Sun and Weinberger (2017). On the averaged probabilities p̄, where the loss is convex in
1/T and has p̄ itself at T = 1: on the rows it is fitted to, the log-likelihood never gets worse.
The likeliest class stays what it was. T lies in [0.01, 1e8]: 0.01 when every row is classified
correctly, so that no T is sharp enough; 1e8, which is uniform, when the classes are ranked worse
than by chance. Where no T matters (uniform predictions) it is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from doxa import store
from doxa.evaluate.recalibrate.rows import ClassMap, Labelled

_MOST_STEPS = 200


@store.register("recalibrate.temperature")
@dataclass(frozen=True)
class Temperature(ClassMap):
    """Probabilities to the power 1 / temperature, normalised."""

    temperature: float

    def map(self, table: Tensor) -> Tensor:
        return torch.log_softmax(table / self.temperature, 1)


def fit_temperature(rows: Labelled) -> Temperature:
    """The root of the derivative, by Newton steps on log(1/T) kept inside a bracket."""
    z = rows.log_probs - rows.log_probs.amax(1, keepdim=True)
    of_label = z.gather(1, rows.y.unsqueeze(1)).squeeze(1)

    def derivatives(log_beta: float) -> tuple[float, float]:
        """The first and second of the mean loss with respect to log β, β = 1/T."""
        beta = math.exp(log_beta)
        probs = torch.softmax(beta * z, 1)
        expected = (probs * z).sum(1)
        spread = (probs * (z - expected.unsqueeze(1)).square()).sum(1).mean()
        slope = beta * float((expected - of_label).mean())
        return slope, beta * beta * float(spread) + slope

    slope, _ = derivatives(0.0)
    if slope == 0.0:
        return Temperature(1.0)
    low, high = (0.0, math.log(1e2)) if slope < 0 else (-math.log(1e8), 0.0)
    end = high if slope < 0 else low
    if derivatives(end)[0] * slope > 0:  # it still falls at the end of the range
        return Temperature(math.exp(-end))
    at = 0.0
    for _ in range(_MOST_STEPS):
        slope, curvature = derivatives(at)
        low, high = (at, high) if slope < 0 else (low, at)
        new = at - slope / curvature if curvature > 0 else math.inf
        if not low < new < high:
            new = 0.5 * (low + high)
        if slope == 0.0 or abs(new - at) <= 1e-14 * max(1.0, abs(at)):
            break
        at = new
    return Temperature(math.exp(-at))
