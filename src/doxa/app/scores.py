"""Held-out scores of one predictive, for the tables of `compare` and `demo`.

log likelihood = (1/N) Σ log p(y_i | x_i, D), in the units of y; higher is better.
Coverage = the fraction of y inside the central 95 % interval; 0.95 is right.
Brier = (1/N) Σ_i Σ_c (p_ic − 1[y_i = c])²; lower is better.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from doxa.app.predictions import array, class_probs, flat
from doxa.app.schema import Schema
from doxa.app.tables import Array


def scores(p: Any, y: Array, schema: Schema) -> dict[str, float]:
    """{score: value}; y as `Schema.targets` gives it."""
    target = torch.as_tensor(y)
    if schema.classes is None and target.is_floating_point():
        target = target.to(p.mean.dtype)
    result = {"log likelihood": float(array(p.log_prob(target)).mean())}
    if schema.classes is None:
        low, high = (flat(bound) for bound in p.interval(0.95))
        error = flat(p.mean) - y
        result["RMSE"] = float(np.sqrt(np.mean(error**2)))
        result["95 % coverage"] = float(np.mean((low <= y) & (y <= high)))
        return result
    probs = class_probs(p, schema)
    truth = np.eye(len(schema.classes))[y.astype(int)]
    result["accuracy"] = float(np.mean(probs.argmax(axis=1) == y))
    result["Brier"] = float(np.mean(np.sum((probs - truth) ** 2, axis=1)))
    return result
