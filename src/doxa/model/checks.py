"""What a network's outputs mean, where that is in doubt: no likelihood was given, or the outputs
are probabilities where the likelihood takes logits.

Has a network been trained, so that a fresh start would throw that away?

Each tensor of k weights is compared with one that its layer has newly drawn. For independent draws
of one distribution whose tails are no heavier than a normal's, the log of the ratio of their root
mean squares has a standard deviation of at most 1/√k: six of them are beyond chance, whatever the
number of tensors. What a layer does not draw (a normalisation's scale, a zero bias) must still be
the same number everywhere, and BatchNorm must have counted no batch. A network with an
initialisation of its own may look trained too: a fresh start loses it just the same.

Does every weight reach the outputs in a way that autograd sees?

A `detach`, a `no_grad` around a part of the network, a detour through numpy or rounding cut weights
off: the outputs depend on them, their gradient says that they do not, and an optimiser or a sampler
would leave them to the prior without a word. A weight that the outputs do not depend on at all is
nobody's mistake; it follows the prior, as it should.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data import cast
from doxa.errors import ModelError
from doxa.likelihoods import Bernoulli, Categorical, Heads, Inferred, Likelihood, assumed, infer
from doxa.linalg.layout import Params
from doxa.model.model import Inputs, Model
from doxa.noise import Noise

log = logging.getLogger("doxa")


def infer_likelihood(
    model: Model, x: Inputs, y: Any, complete: bool
) -> tuple[Model, Inferred | None]:
    """The model with the likelihood that y suggests, where none was given; `complete`: y holds all
    rows."""
    if not model.assumed:
        return model, None
    seen = looked_at(model, x)
    inferred = _logged(infer(y, seen.output, complete))
    return seen.meaning(assumed(inferred.name)), inferred


def infer_from_targets(y: Any, complete: bool) -> Inferred:
    """The likelihood that y suggests by itself, where there is no network."""
    return _logged(infer(y, tuple(y.shape[1:]) if isinstance(y, Tensor) else (), complete))


def _logged(inferred: Inferred) -> Inferred:
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


_DEVIATIONS = 6.0
_LEAST = 16  # numbers; of fewer, the logarithm's tails are too long


def warn_if_pretrained(model: Model, fresh: Tensor) -> None:
    """Warn where the given weights do not look like new ones, as `fresh` [P] are."""
    found = trained_tensors(model, fresh)
    if found:
        log.warning(
            "the network's weights do not look freshly initialised (%s), and init='fresh' replaces "
            "them: use init='given' to start from them",
            ", ".join(found[:3]) + (", …" if len(found) > 3 else ""),
        )


def trained_tensors(model: Model, fresh: Tensor) -> list[str]:
    """The names of weights and counters that training must have changed."""
    given, new = model.layout.unflatten(model.given()), model.layout.unflatten(fresh)
    found = [
        name for name, value in given.items()
        if not name.startswith("likelihood.") and _moved(value.double(), new[name].double())
    ]  # fmt: skip
    counters = [name for name in model.tracked if name.endswith("num_batches_tracked")]
    return found + [name for name in counters if int(model.fixed[name]) > 0]


def _moved(given: Tensor, fresh: Tensor) -> bool:
    differs = _constant(fresh)
    if not differs and fresh.numel() >= _LEAST:
        size = lambda t: t.square().mean().clamp_min(1e-300).sqrt().log()  # noqa: E731
        gap = (size(given) - size(fresh)).abs() * fresh.numel() ** 0.5
        differs = bool(gap > _DEVIATIONS)
    return differs and not _constant(given)  # training does not leave such


def _constant(values: Tensor) -> bool:
    return bool((values == values.flatten()[0]).all())


def check_gradient_flow(model: Model, start: Tensor, x: Any) -> Any:
    """At one member's start [P] and a few rows: the outputs, or `ModelError` with the names of what
    is cut off."""
    params = model.layout.unflatten(start)
    own = {k: v.detach() for k, v in params.items() if not k.startswith("likelihood.")}
    leaves = {k: v.clone().requires_grad_() for k, v in own.items()}
    with torch.enable_grad():
        f = model.forward(leaves, x)
    suspects = _without_gradient(leaves, f)
    if suspects:
        _check_cut(model, own, suspects, x)
    return f


def _check_cut(model: Model, own: Params, suspects: list[str], x: Any) -> None:
    """The outputs do not change with those weights, or it is an error."""
    before = _outputs(model, own, x)
    if not _same(before, _outputs(model, own, x)):
        return  # a network that draws for itself
    cut = [name for name in suspects if not _same(before, _outputs(model, _pushed(own, name), x))]
    if cut:
        raise ModelError(
            f"the outputs depend on {', '.join(map(repr, cut[:5]))} but have no gradient with "
            "respect to it: look for detach, torch.no_grad, .data, numpy or rounding; weights that "
            "are meant to be fixed need requires_grad_(False)"
        )


def _without_gradient(leaves: Params, f: Any) -> list[str]:
    """Names of the weights that autograd does not find; of all, where every gradient is zero."""
    with torch.enable_grad():
        outputs = [leaf for leaf in tree_flatten(f)[0] if leaf.requires_grad]
        if not outputs:
            return list(leaves)
        total = torch.stack([f.double().square().sum() + f.double().sum() for f in outputs]).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    if not any(g is not None and bool((g != 0).any()) for g in grads):
        return list(leaves)
    return [name for name, grad in zip(leaves, grads, strict=True) if grad is None]


def _outputs(model: Model, own: Params, x: Any) -> list[Tensor]:
    with torch.no_grad():
        return tree_flatten(model.forward(own, x))[0]


def _pushed(own: Params, name: str) -> Params:
    value = own[name]
    noise = Noise(0, "reach", [0], value.device, value.dtype).normal((value.numel(),))[0]
    return own | {name: value + noise.reshape(value.shape)}


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
