"""What a network's outputs mean, where that is in doubt: no likelihood was given, or the outputs
are probabilities where the likelihood takes logits."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import cast
from doxa.likelihoods import Bernoulli, Categorical, Heads, Inferred, Likelihood, assumed, infer
from doxa.model.model import Inputs, Model

log = logging.getLogger("doxa")


def understood(model: Model, x: Inputs, y: Any, complete: bool) -> tuple[Model, Inferred | None]:
    """The model with the likelihood that y suggests, where none was given; `complete`: y holds all
    rows."""
    if not model.assumed:
        return model, None
    seen = looked_at(model, x)
    inferred = _said(infer(y, seen.output, complete))
    return seen.meaning(assumed(inferred.name)), inferred


def meant(y: Any, complete: bool) -> Inferred:
    """The likelihood that y suggests by itself, where there is no network."""
    return _said(infer(y, tuple(y.shape[1:]) if isinstance(y, Tensor) else (), complete))


def _said(inferred: Inferred) -> Inferred:
    if inferred.said:
        advice = f"; {inferred.advice}" if inferred.advice else ""
        log.log(inferred.level, "likelihood: %s%s", inferred.said, advice)
    return inferred


def looked_at(model: Model, x: Inputs) -> Model:
    """A copy that has seen a row: it knows its outputs, its dropout layers and which layer runs
    last; itself, if it has."""
    if model.output is not None:
        return model
    row = tree_map(lambda t: cast(t[:1], model.device, model.dtype), x)
    return copy.copy(model).build(row)


def check_logits(whole: Likelihood, f: Any) -> None:
    """Warn where outputs, as they come from autograd, are probabilities."""
    each = zip(whole.likelihoods, f, strict=True) if isinstance(whole, Heads) else [(whole, f)]
    for likelihood, output in each:
        found = likelihood.classifies and _probabilities(likelihood, output)
        if found:
            log.warning("the network's outputs %s", found)


def _probabilities(likelihood: Likelihood, f: Tensor) -> str:
    """What outputs are, if they are not logits."""
    if isinstance(likelihood, Bernoulli) and _ends_in_sigmoid(f):
        return (
            "end in a sigmoid, and a bernoulli likelihood takes logits: it would be applied twice, "
            "and no probability could leave 0.5 … 0.73; drop the last layer"
        )
    if not isinstance(likelihood, Categorical):
        return ""
    f = f.detach()
    near = torch.finfo(f.dtype).eps ** 0.5
    if bool((f >= 0).all()) and bool(((f.sum(1) - 1).abs() < near).all()):
        return (
            "sum to 1 like a softmax, and a categorical likelihood takes logits: softmax would be "
            f"applied twice, and no probability of {f.shape[1]} classes could exceed "
            f"{_most(f.shape[1]):.2f}; drop the last layer"
        )
    if bool((f.logsumexp(1).abs() < near).all()):
        return (
            "are log-probabilities: a categorical likelihood takes logits, and predicts the same "
            "from these, but scores of the logits themselves (energy) are then constant; drop the "
            "log-softmax"
        )
    return ""


def _most(classes: int) -> float:
    """The largest probability that softmax gives to probabilities: e / (e + C − 1)."""
    return 1.0 / (1.0 + (classes - 1) / math.e)


def _ends_in_sigmoid(f: Tensor) -> bool:
    """Whether autograd saw a sigmoid last, but for changes of shape."""
    node = f.grad_fn
    while node is not None and node.name().rstrip("0123456789") in _RESHAPES:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("SigmoidBackward")


_RESHAPES = {
    f"{name}Backward" for name in (
        "Alias", "Clone", "Permute", "Reshape", "ReshapeAlias", "Select", "Slice", "Squeeze", "T",
        "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
}  # fmt: skip
