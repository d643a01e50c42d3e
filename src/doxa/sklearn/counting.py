"""A weight is a count: a row of weight 2 gives what the row twice gives, to the bit.

Rows that occur more than once become one row with the sum of their weights, rows of weight 0 are
left out, and the others stand in an order that does not depend on how they were passed. So a copy
of a row is never among the rows that judge a fit to the row itself. Rows without weights or copies
are passed on as they are.
"""

from __future__ import annotations

import logging

import numpy as np

from doxa.sklearn.inputs import Array

log = logging.getLogger("doxa")


def counted(X: Array, y: Array, weight: Array | None) -> tuple[Array, Array, Array | None]:
    """(X, y, weight) with each row once; weight is None where every row counts one."""
    if weight is not None:
        X, y, weight = X[weight != 0], y[weight != 0], weight[weight != 0]
    table = np.ascontiguousarray(np.column_stack([X, y]), np.float64) + 0.0  # -0.0 is 0.0
    keys = table.view(np.dtype((np.void, table.dtype.itemsize * table.shape[1]))).ravel()
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    copies = len(X) - len(first)
    if copies == 0 and (weight is None or bool((weight == 1).all())):
        return X, y, None
    if copies:
        log.info("%d rows are copies of others: they count as weights", copies)
    return X[first], y[first], np.bincount(which, weights=weight).astype(np.float64)
