"""What is believed before the data: the network, its likelihood and its prior, as a problem."""

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
    """What is fitted, under which likelihood, and how that was inferred where none was given."""
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
    """What is fitted, and how its likelihood was inferred where none was given."""
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
    if not any("likelihood" in spec.hyper for spec in specs):  # else the grid gives them
        try:
            prior_moments, inferred = infer_likelihood(
                prior_moments, given.x, given.y, given.source is None
            )
        except ModelError as error:
            raise error if given.tasks is None else _for_tasks(method, error) from error
    if type(method).prepare is not Method.prepare:  # it asks which layers there are
        prior_moments = looked_at(prior_moments, given.x)
    return Network(prior_moments), inferred


def _for_tasks(method: Method, error: ModelError) -> ModelError:
    """Why a network cannot take tasks."""
    words = (
        "the data are tasks, which a network is given as context_x, context_y, context and "
        'target_x: write one that takes these, or use a neural process ("cnp", "tnp", …) with '
        f"None in place of the network ({error})"
    )
    alone = f"{method.name} brings its own network: pass None in its place"
    return ModelError(words if method.needs_network else alone)
