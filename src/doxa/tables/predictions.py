"""Predictions as columns of a table, in the units and labels of the target.

Regression, all in the unit of the target: mean, std, aleatoric_std and epistemic_std (standard
deviations, whose squares add up to that of std), low and high of an interval, and its level.
Classification: one probability per class, the predicted class, the entropy of the prediction and
its epistemic part (mutual information), in nats; for a conformal run or a given level also the
prediction set of classes, and its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from doxa.likelihoods import LIKELIHOODS
from doxa.tables.reading import Array, import_pandas
from doxa.tables.schema import Schema

if TYPE_CHECKING:
    import pandas as pd


SEPARATOR = " | "  # between the classes of a set
DEFAULT_LEVEL = 0.95  # of `Predictive.interval`
ROWS_AT_ONCE = 8192  # bounds the memory of a prediction; rows do not depend on each other


def conformal_level(posterior: Any) -> float | None:
    """The level of a conformal posterior; None for any other posterior."""
    return None if posterior.transform is None else posterior.transform.guaranteed_level


def predict_frame(
    posterior: Any, schema: Schema, frame: pd.DataFrame, level: float | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Predictions for every row of `frame`, with its index, and notes for the user. The default
    level is that of a conformal posterior, else 0.95."""
    x, notes = schema.features(frame)
    table = predict_inputs(posterior, schema, x, level)
    return import_pandas().DataFrame(table, index=frame.index), notes


def predict_inputs(
    posterior: Any, schema: Schema, x: Array, level: float | None = None
) -> dict[str, Array]:
    """{column name: [N]} at the inputs of a network [N, D], `ROWS_AT_ONCE` of them at a time."""
    guaranteed = conformal_level(posterior)
    sets = level is not None or guaranteed is not None
    parts = [
        columns(posterior.predict(x[start : start + ROWS_AT_ONCE]), schema, level, sets)
        for start in range(0, len(x), ROWS_AT_ONCE)
    ]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if sets or schema.classes is None:  # of the interval, or of the set
        found["level"] = np.full(len(x), level or guaranteed or DEFAULT_LEVEL)
    return found


def columns(
    p: Any, schema: Schema, level: float | None = None, sets: bool = False
) -> dict[str, Array]:
    """{column name: [N]} of one predictive; `sets`: with prediction sets of classes."""
    if schema.classes is None:
        low, high = (flat(bound) for bound in p.interval(level))
        return {
            "mean": flat(p.mean),
            "std": flat(p.std),
            "aleatoric_std": np.sqrt(flat(p.aleatoric)),
            "epistemic_std": np.sqrt(np.maximum(flat(p.epistemic), 0.0)),
            "low": low,
            "high": high,
        }
    probs = class_probs(p, schema)
    table = {f"p({label})": probs[:, k] for k, label in enumerate(schema.classes)}
    labels = np.array(schema.classes, dtype=object)
    table["predicted"] = labels[probs.argmax(axis=1)]
    table["entropy"] = flat(p.entropy)
    if p.splits:
        table["mutual_information"] = flat(p.mutual_information)
    if sets:
        chosen = p.prediction_set(level).reshape(len(probs), -1).cpu().numpy()
        table["set"] = np.array([SEPARATOR.join(map(str, labels[row])) for row in chosen], object)
        table["set_size"] = chosen.sum(axis=1)
    return table


def output_names(posterior: Any, schema: Schema, level: float | None = None) -> list[str]:
    """The columns that a prediction may have."""
    if schema.classes is None:
        return ["mean", "std", "aleatoric_std", "epistemic_std", "low", "high", "level"]
    names = [f"p({label})" for label in schema.classes]
    names += ["predicted", "entropy", "mutual_information"]
    sets = level is not None or conformal_level(posterior) is not None
    return names + ["set", "set_size", "level"] * sets


def class_probs(p: Any, schema: Schema) -> Array:
    """[N, C], also for a Bernoulli likelihood, whose one number is P(second class)."""
    if LIKELIHOODS[schema.likelihood].binary:
        second = flat(p.mean)
        return np.stack([1.0 - second, second], axis=1)
    return array(p.probs)


def flat(values: Tensor) -> Array:
    return array(values).reshape(len(values))


def array(values: Tensor) -> Array:
    return values.detach().cpu().double().numpy()
