"""Which rows to label for a network, as an experiment: θ is the function, a design is rows.

    EIG(rows) = I(y_rows; f) = H[y_rows] − E_f H[y_rows | f]

Of one row this is BALD (Houlsby et al., 2011); of several it is their joint, which counts what
they would tell twice only once (BatchBALD, Kirsch et al., 2019). θ is one of the S functions that
a posterior's predictive holds, so every estimator here applies: "exact" sums over functions and
labels, and the others where labels are numbers or a batch has too many outcomes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributions as D

from doxa import checks
from doxa.decide.design.beliefs import Weighted
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.space import Choices, Sequence
from doxa.errors import MethodError
from doxa.predictive import Predictive


def labelling(p: Predictive, batch: int | None = None) -> Experiment:
    """The experiment of labelling rows of a predictive.

    Parameters
    ----------
    p: what a posterior (or anyone) predicts at N rows, as samples of functions.
    batch: rows that are labelled together; a design is then [batch] rows, else one row.

    Returns
    -------
    An `Experiment`: `eig(labelling(p), None, "exact")` is BALD of every row.

    Examples
    --------
    >>> import torch, doxa
    >>> from doxa.decide import eig
    >>> from doxa.decide.design import labelling
    >>> p = doxa.Predictive.from_probs(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    >>> float(eig(labelling(p), None, "exact").values).__round__(4)  # one bit
    0.6931
    """
    outcome, rows = _outcomes(p)
    space: Choices | Sequence = Choices(torch.arange(rows, dtype=p.weights.dtype))
    if batch is not None:
        space = Sequence(space, checks.whole("batch", batch))

    def likelihood(function: Tensor, row: Tensor) -> D.Distribution:
        if batch is not None:
            function = function.unsqueeze(-1)
        found = outcome(*torch.broadcast_tensors(function.long(), row.round().long()))
        return found if batch is None else D.Independent(found, 1)

    functions = torch.arange(len(p.weights), dtype=p.weights.dtype)
    return Experiment(Weighted(functions, p.weights.log()), likelihood, space=space)


def _outcomes(p: Predictive) -> tuple[Callable[[Tensor, Tensor], D.Distribution], int]:
    """p(y | f_s, row) as a function of s and row, and how many rows there are."""
    samples = p.samples  # says so where functions are not kept
    likelihood = p.likelihood
    if likelihood.classifies and samples.ndim == 3:
        log_p = samples.log_softmax(2)
        return lambda s, row: D.Categorical(logits=log_p[s, row], validate_args=False), (
            log_p.shape[1]
        )
    if samples[0, 0].numel() != 1:
        raise MethodError(
            f"a label must be one class or one number, and outputs are {list(samples.shape[2:])}"
        )
    flat = samples.reshape(samples.shape[:2])
    if likelihood.discrete and likelihood.name != "bernoulli":
        raise MethodError(f"labels of {likelihood.name} are not supported: classes or numbers")
    if likelihood.discrete:
        return lambda s, row: D.Bernoulli(logits=flat[s, row], validate_args=False), flat.shape[1]
    _, mean, std = p.normals()
    mean, std = mean.reshape(flat.shape).to(flat), std.expand_as(mean).reshape(flat.shape).to(flat)
    return lambda s, row: D.Normal(mean[s, row], std[s, row], validate_args=False), flat.shape[1]
