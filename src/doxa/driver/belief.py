"""Build the problem that a method fits: the network, its likelihood and its prior.

If the user gives no likelihood, it is inferred from the targets and the network's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import tree_map

from doxa import likelihoods
from doxa.driver.runs import RunSpec
from doxa.driver.setup import Given
from doxa.errors import MethodError, ModelError
from doxa.likelihoods import Inferred, Likelihood
from doxa.method import Method
from doxa.model import Model, Subset
from doxa.model.checks import infer_from_targets, infer_likelihood, looked_at
from doxa.model.model import Network, NoNetwork, Problem


def build_problem(
    model: Any, method: Method, likelihood: Any, prior: Any, subset: Subset | None, given: Given,
    specs: Sequence[RunSpec],
) -> tuple[Problem, Likelihood, Inferred | None]:  # fmt: skip
    """The problem, its likelihood, and how the likelihood was inferred (None if it was given)."""
    problem, inferred = _problem(model, method, likelihood, prior, subset, given, specs)
    prior_moments = problem.model
    noise_model = (
        prior_moments.likelihood if prior_moments
        else likelihoods.likelihood(likelihood or (inferred.name if inferred else "gaussian"))
    )  # fmt: skip
    if method.regression_only and not noise_model.is_normal:
        why = f' ({inferred.reason}); likelihood="gaussian" takes y as numbers' if inferred else ""
        other = "" if method.needs_network else "; sparse-gp takes any likelihood"
        raise MethodError(
            f"{method.name} is for regression with Gaussian noise, not {noise_model.name}"
            f"{why}{other}"
        )
    return problem, noise_model, inferred


def _problem(
    model: Any, method: Method, likelihood: Any, prior: Any, subset: Subset | None, given: Given,
    specs: Sequence[RunSpec],
) -> tuple[Problem, Inferred | None]:  # fmt: skip
    """The problem, and how its likelihood was inferred (None if it was given)."""
    if model is None:
        if method.needs_network:
            raise ModelError(
                f"{method.name} needs a network; only linear and process methods do not"
            )
        shapes = (tree_map(lambda t: list(t.shape[1:]), tree) for tree in (given.x, given.y))
        own = NoNetwork(*shapes)
        if likelihood is not None or method.regression_only:
            return own, None
        return own, infer_from_targets(given.y, given.source is None)
    if isinstance(model, Model):
        if likelihood is not None or prior is not None or subset is not None:
            raise ModelError("the Model already has likelihood, prior and subset; set them there")
        prior_moments = model.unseen()
    else:
        prior_moments = Model(model, likelihood, prior, subset or "all")
    inferred = None
    if not any("likelihood" in spec.hyper for spec in specs):  # otherwise the grid has them
        try:
            prior_moments, inferred = infer_likelihood(
                prior_moments, given.x, given.y, given.source is None
            )
        except ModelError as error:
            raise error if given.tasks is None else _for_tasks(method, error) from error
    if type(method).prepare is not Method.prepare:  # `prepare` needs the network's layers
        prior_moments = looked_at(prior_moments, given.x)
    return Network(prior_moments), inferred


def _for_tasks(method: Method, error: ModelError) -> ModelError:
    """The error for a network that does not accept tasks as input."""
    message = (
        "the data are tasks, and the network's inputs are then context_x, context_y, context and "
        "target_x: pass a network with these arguments, or use a neural process "
        f'("cnp", "tnp", …) with None in place of the network ({error})'
    )
    alone = f"{method.name} has its own network: pass None in place of the network"
    return ModelError(message if method.needs_network else alone)
