"""Vector and Dirichlet scaling: multinomial logistic regression on log-probabilities.

    vector      q = softmax(a ⊙ log p̄ + b)          Guo, Pleiss, Sun and Weinberger (2017)
    Dirichlet   q = softmax(W log p̄ + b)            Kull, Perello-Nieto, Kängsepp et al. (2019)

Both losses are convex and hold p̄ itself (a = 1, W = I, b = 0), where the search starts: without
regularisation the log-likelihood of the calibration rows never gets worse. Dirichlet scaling has
C² + C parameters; ODIR, its authors' regularisation, adds

    off_diagonal / (C (C - 1)) Σ_{i≠j} W_ij²  +  intercept / C  Σ_j b_j²

to the mean loss. Rows that can be told apart perfectly have no finite optimum: the search ends
when the gradient of the mean loss is below 1e-10. With Bernoulli, no and yes are the two classes,
and all outputs of a row share the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from doxa import store
from doxa.errors import MethodError
from doxa.evaluate.recalibrate.convex import minimise
from doxa.evaluate.recalibrate.rows import ClassMap, Labelled


@store.register("recalibrate.vector")
@dataclass(frozen=True, eq=False)
class Vector(ClassMap):
    """A factor and an offset for each class."""

    scale: Tensor  # [C]
    bias: Tensor  # [C]

    def map(self, table: Tensor) -> Tensor:
        own = (1, -1, *[1] * (table.ndim - 2))
        scale, bias = (t.to(table).reshape(own) for t in (self.scale, self.bias))
        return torch.log_softmax(table * scale + bias, 1)


@store.register("recalibrate.dirichlet")
@dataclass(frozen=True, eq=False)
class Dirichlet(ClassMap):
    """A matrix and an offset."""

    matrix: Tensor  # [C, C]
    bias: Tensor  # [C]

    def map(self, table: Tensor) -> Tensor:
        matrix, bias = self.matrix.to(table), self.bias.to(table)
        logits = (table.movedim(1, -1) @ matrix.t() + bias).movedim(-1, 1)
        return torch.log_softmax(logits, 1)


def fit_vector(rows: Labelled) -> Vector:
    rows.check_classes("vector")
    z = rows.log_probs
    centre, spread = z.mean(0), z.std(0, unbiased=False)
    spread = torch.where(spread > 1e-12 * centre.abs(), spread, 1.0)
    fitted = (z - centre) / spread

    def loss(theta: Tensor) -> Tensor:
        return _mean_loss(fitted * theta[0] + theta[1], rows.y)

    theta = minimise(loss, torch.stack([spread, centre]))
    scale = theta[0] / spread
    return Vector(scale, theta[1] - scale * centre)


def fit_dirichlet(
    rows: Labelled, *, off_diagonal: float = 0.0, intercept: float = 0.0
) -> Dirichlet:
    for name, value in (("off_diagonal", off_diagonal), ("intercept", intercept)):
        if not 0.0 <= value < float("inf"):
            raise MethodError(f"{name} must be a number, zero or more, not {value!r}")
    rows.check_classes("dirichlet")
    z, classes = rows.log_probs, rows.log_probs.shape[1]
    table = torch.cat([z, z.new_ones(len(z), 1)], 1)
    whiten = _whitening(table)
    design = table @ whiten
    eye = torch.eye(classes, dtype=z.dtype, device=z.device)
    start = torch.cat([eye, eye.new_zeros(1, classes)])

    def loss(theta: Tensor) -> Tensor:
        value = _mean_loss(design @ theta, rows.y)
        if off_diagonal or intercept:
            raw = whiten @ theta
            off = (raw[:-1] * (1.0 - eye)).square().sum() / (classes * (classes - 1))
            value = value + off_diagonal * off + intercept * raw[-1].square().mean()
        return value

    first = torch.linalg.solve(whiten, start)
    raw = start + whiten @ (minimise(loss, first) - first)
    return Dirichlet(raw[:-1].t().contiguous(), raw[-1])


def _mean_loss(logits: Tensor, y: Tensor) -> Tensor:
    of_label = logits.gather(1, y.unsqueeze(1)).squeeze(1)
    return (torch.logsumexp(logits, 1) - of_label).mean()


def _whitening(table: Tensor) -> Tensor:
    """[D, D], invertible, such that the columns of table @ it are orthonormal, times √n;
    directions in which the table does not vary are left as they are."""
    triangle = torch.linalg.qr(table, mode="r")[1] / len(table) ** 0.5
    _, values, directions = torch.linalg.svd(triangle, full_matrices=True)
    scale = table.new_ones(table.shape[1])
    scale[: len(values)] = torch.where(values > 1e-10 * values[0], values, 1.0)
    return directions.t() / scale
