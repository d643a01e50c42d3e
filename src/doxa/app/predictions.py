"""A predictive as columns of a table, in the units and labels of the target.

Regression, all in the unit of the target: mean, std, aleatoric_std and epistemic_std (standard
deviations, whose squares add up to that of std), low and high of an interval.
Classification: one probability a class, the predicted class, the entropy of the prediction and the
part of it that more data could remove (mutual information), in nats; where the run is conformal or
a level was asked for, the set of classes that holds the truth, and its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from doxa.app.calibration import conformal_level
from doxa.app.cells import Array, import_pandas
from doxa.app.schema import Schema

if TYPE_CHECKING:
    import pandas as pd

SEPARATOR = " | "  # between the classes of a set
ROWS_AT_ONCE = 8192  # bounds the memory of a prediction; rows do not depend on each other


def predict_table(
    posterior: Any, schema: Schema, frame: pd.DataFrame, level: float | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Predictions for every row of `frame`, with its index, and notes for the user. Without a
    level it is a conformal posterior's own, else 0.95."""
    pandas = import_pandas()
    x, notes = schema.features(frame)
    sets = level is not None or conformal_level(posterior) is not None
    parts = [
        columns(posterior.predict(x[start : start + ROWS_AT_ONCE]), schema, level, sets)
        for start in range(0, len(x), ROWS_AT_ONCE)
    ]
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return pandas.DataFrame(table, index=frame.index), notes


def columns(
    p: Any, schema: Schema, level: float | None = None, sets: bool = False
) -> dict[str, Array]:
    """{column name: [N]} of one predictive; of classes, with their sets where those are wanted."""
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
    if hasattr(p, "mutual_information"):
        table["mutual_information"] = flat(p.mutual_information)
    if sets:
        chosen = p.prediction_set(level).reshape(len(probs), -1).cpu().numpy()
        table["set"] = np.array([SEPARATOR.join(map(str, labels[row])) for row in chosen], object)
        table["set_size"] = chosen.sum(axis=1)
    return table


def class_probs(p: Any, schema: Schema) -> Array:
    """[N, C], also for a Bernoulli likelihood, whose one number is P(second class)."""
    if schema.likelihood == "bernoulli":
        second = flat(p.mean)
        return np.stack([1.0 - second, second], axis=1)
    return array(p.probs)


def flat(values: Tensor) -> Array:
    return array(values).reshape(len(values))


def array(values: Tensor) -> Array:
    return values.detach().cpu().double().numpy()
