"""The posterior over models, and the prediction that averages over them.

    p(M_i | D) = p(D | M_i) p(M_i) / Σ_j p(D | M_j) p(M_j)
    p(y | x, D) = Σ_i p(M_i | D) p(y | x, M_i, D)

Models are compared by their log evidence p(D | M_i). So each posterior must have one (exact,
Laplace or GP), and all must be fitted to the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from doxa.errors import MethodError, Unavailable
from doxa.posterior import MixturePosterior, Posterior


def posterior_over_models(
    posteriors: Iterable[Posterior], prior: Sequence[float] | Tensor | None = None
) -> Tensor:
    """The posterior probability p(M_i | D) of each model.

    Parameters
    ----------
    posteriors : list of Posterior or Sweep
        One posterior per model, such as the `Sweep` of a grid.
    prior : sequence of float, optional
        p(M_i), up to a factor. Default: equal for all models.

    Returns
    -------
    Tensor of shape [models]
        p(M_i | D).

    Examples
    --------
    >>> import torch, doxa
    >>> from doxa.exact import posterior_over_models
    >>> x = torch.linspace(-2, 2, 40).double()[:, None]
    >>> y = 1 - 2 * x + x**2 + 0.1 * torch.sin(40 * x)
    >>> orders = doxa.Runs(grid={"degree": [0, 1, 2, 3]})
    >>> sweep = doxa.fit(None, (x, y), doxa.BayesianLinear("polynomial"), runs=orders)
    >>> int(posterior_over_models(sweep).argmax())
    2
    """
    given = list(posteriors)
    if not given:
        raise MethodError("there are no models to compare")
    missing = [i for i, each in enumerate(given) if each.log_evidence is None]
    if missing:
        raise Unavailable(
            f"model {missing[0]} ({given[missing[0]].kind}) has no evidence; fit exact, Laplace or "
            "GP models at temperature 1, without sample weights"
        )
    rows = {each.diagnostics["rows"] for each in given if "rows" in each.diagnostics}
    if len(rows) > 1:
        raise MethodError(f"the models were fitted to different numbers of rows: {sorted(rows)}")
    logs = torch.tensor([_log_evidence(each) for each in given], dtype=torch.float64)
    if prior is not None:
        weight = torch.as_tensor(prior, dtype=torch.float64)
        if weight.shape != logs.shape or bool((weight < 0).any()) or float(weight.sum()) <= 0:
            raise MethodError(
                f"prior must be {len(given)} nonnegative numbers, not all zero; got {prior}"
            )
        logs = logs + weight.log()
    return torch.softmax(logs, 0)


def model_average(
    posteriors: Iterable[Posterior], prior: Sequence[float] | Tensor | None = None
) -> MixturePosterior:
    """The mixture of the posteriors, each with the weight p(M_i | D).

    Parameters
    ----------
    posteriors : list of Posterior or Sweep
        As in `posterior_over_models`.
    prior : sequence of float, optional
        As in `posterior_over_models`.

    Returns
    -------
    MixturePosterior
        The mixture.
    """
    given = list(posteriors)
    return MixturePosterior(given, posterior_over_models(given, prior))


def _log_evidence(posterior: Any) -> float:
    return float(posterior.log_evidence)
