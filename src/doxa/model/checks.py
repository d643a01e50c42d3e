"""Checks of a network before a fit: its likelihood, pretrained weights, and the flow of gradients.

**Likelihood** (`infer_likelihood`, `check_logits`). The likelihood is inferred if none is given. A
warning is logged if the outputs are probabilities and the likelihood takes logits.

**Pretrained weights** (`warn_if_pretrained`). A new initialisation would discard trained weights.
Each tensor of k weights is compared with a newly initialised one. For independent draws of one
distribution with tails no heavier than those of a normal, the log of the ratio of their root mean
squares has a standard deviation of at most 1/√k; a difference of six standard deviations is beyond
chance for any number of tensors. Values that are not initialised at random (the scale of a
normalisation, a zero bias) must still be one constant, and BatchNorm must have counted no batch. A
network with a custom initialisation may also look trained; a new initialisation discards it too.

**Flow of gradients** (`check_gradient_flow`). A `detach`, a `no_grad` around a part of the network,
a conversion to numpy or rounding can cut the gradient: the outputs depend on the weights, but the
gradient is zero or missing. An optimiser or a sampler would then silently leave these weights at
the prior. A weight on which the outputs do not depend at all is no error; its posterior is the
prior. A backward pass that computes parts of the forward pass again (activation checkpointing) has
the network's own weights there, because those that are fitted are arguments of a call that has
ended; this is an error, too.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data import cast
from doxa.errors import ModelError
from doxa.likelihoods import Heads, Inferred, Likelihood, assumed, infer
from doxa.linalg.layout import Params
from doxa.model.inspection import with_tensors
from doxa.model.model import Inputs, Model
from doxa.noise import Noise

log = logging.getLogger("doxa")


def infer_likelihood(
    model: Model, x: Inputs, y: Any, complete: bool
) -> tuple[Model, Inferred | None]:
    """The model with the likelihood inferred from y, if none was given, and with the settings that
    follow from the shape of y. `complete`: y contains all rows."""
    if not model.assumed:
        several = any(getattr(leaf, "ndim", 1) > 1 for leaf in tree_flatten(y)[0])
        classes = any(head.class_axis for head in model.likelihood.heads)
        return (_for_targets(looked_at(model, x), x, y) if several and classes else model), None
    seen = looked_at(model, x)
    inferred = _logged(infer(y, seen.output, complete))
    return _for_targets(seen.with_likelihood(assumed(inferred.name)), x, y), inferred


def _for_targets(seen: Model, x: Inputs, y: Any) -> Model:
    """A built model whose likelihood has the settings that follow from the shape of y."""
    found = seen.likelihood.for_targets(y, seen.output)
    if found == seen.likelihood:
        return seen
    changed = seen.with_likelihood(found)
    changed.output, changed.assumed = None, seen.assumed  # the outputs are arranged differently
    return looked_at(changed, x)


def infer_from_targets(y: Any, complete: bool) -> Inferred:
    """The likelihood inferred from y alone, for problems without a network."""
    return _logged(infer(y, tuple(y.shape[1:]) if isinstance(y, Tensor) else (), complete))


def _logged(inferred: Inferred) -> Inferred:
    if inferred.message:
        advice = f"; {inferred.advice}" if inferred.advice else ""
        log.log(inferred.level, "likelihood: %s%s", inferred.message, advice)
    return inferred


def looked_at(model: Model, x: Inputs) -> Model:
    """A copy of the model after `build` on one row; the model itself if it is already built."""
    if model.output is not None:
        return model
    row = tree_map(lambda t: cast(t[:1], model.device, model.dtype), x)
    return copy.copy(model).build(row)


def as_numbers(model: Model, x: Inputs) -> Inputs:
    """A table of whole numbers (or truth values) as floats, if the network multiplies its inputs;
    any other x as it is.

    Integers are codes to a network that looks them up, such as one with embeddings, and numbers to
    one that multiplies them. A network without embeddings is tried with one row of each. Images
    and sequences of integers stay what they are: their scale is the user's choice.
    """
    if not isinstance(x, Tensor) or x.is_floating_point() or x.ndim > 2 or not len(x):
        return x
    if any(isinstance(each, nn.Embedding | nn.EmbeddingBag) for each in model.net.modules()):
        return x
    row = x[:1].to(model.device)
    if _runs(model, row) or not _runs(model, row.to(model.dtype)):
        return x  # it takes integers, or the error that follows says what is wrong
    log.info("x holds whole numbers, and the network multiplies its inputs: used as numbers")
    return x.double()


def _runs(model: Model, row: Tensor) -> bool:
    """Whether the network gives outputs for this row."""
    try:
        with torch.no_grad():
            model.forward({}, row, buffers=model.scratch())
    except Exception:  # whatever the user's forward raises
        return False
    return True


def check_logits(whole: Likelihood, f: Any) -> None:
    """Warn if the outputs, with their autograd graph, are probabilities."""
    each = zip(whole.likelihoods, f, strict=True) if isinstance(whole, Heads) else [(whole, f)]
    for likelihood, output in each:
        found = likelihood.classifies and _probabilities(likelihood, output)
        if found:
            log.warning("the network's outputs %s", found)


def _probabilities(likelihood: Likelihood, f: Tensor) -> str:
    """A description of the outputs if they are not logits, else ""."""
    if likelihood.binary and _ends_in_sigmoid(f):
        return (
            "end in a sigmoid, and a bernoulli likelihood takes logits: the sigmoid would be "
            "applied twice, and all probabilities would be in 0.5 … 0.73; drop the last layer"
        )
    if not likelihood.class_axis:
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
            "are log-probabilities, and a categorical likelihood takes logits: predictions are the "
            "same, but scores of the logits (energy) are constant; drop the log-softmax"
        )
    return ""


def _most(classes: int) -> float:
    """The largest value of softmax applied to probabilities: e / (e + C − 1)."""
    return 1.0 / (1.0 + (classes - 1) / math.e)


def _ends_in_sigmoid(f: Tensor) -> bool:
    """Whether the last operation in the autograd graph is a sigmoid, apart from reshapes."""
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
_BLOCK = 1 << 20
_LEAST = 16  # numbers in a tensor; for fewer, the tails of the log ratio are too long


COMPUTED_AGAIN = (
    "the network computes a part of its forward pass again in the backward pass, as "
    "torch.utils.checkpoint does: that part would have the network's own weights in place of those "
    "that are fitted, and wrong gradients. Switch it off, and pass recompute='blocks', which does "
    "the same with the right weights; microbatch= saves memory, too"
)


def warn_if_pretrained(model: Model, fresh: Tensor) -> None:
    """Warn if the given weights do not look newly initialised; `fresh` [P] are new weights."""
    found = trained_tensors(model, fresh)
    if found:
        log.warning(
            "the network's weights look trained (%s), and init='fresh' replaces them: use "
            "init='given' to start from them",
            ", ".join(found[:3]) + (", …" if len(found) > 3 else ""),
        )


def trained_tensors(model: Model, fresh: Tensor) -> list[str]:
    """The names of weights and counters that were probably changed by training."""
    given, new = dict(model.net.named_parameters()), model.layout.unflatten(fresh)
    found = [
        name for name, value in new.items()
        if not name.startswith("likelihood.") and _moved(given[name].detach(), value)
    ]  # fmt: skip
    counters = [name for name in model.tracked if name.endswith("num_batches_tracked")]
    return found + [name for name in counters if int(model.fixed[name]) > 0]


def _moved(given: Tensor, fresh: Tensor) -> bool:
    differs = _constant(fresh)
    if not differs and fresh.numel() >= _LEAST:
        gap = abs(_log_size(given) - _log_size(fresh)) * fresh.numel() ** 0.5
        differs = gap > _DEVIATIONS
    return differs and not _constant(given)  # trained weights are not constant


def _log_size(values: Tensor) -> float:
    """The log of the root mean square, in double precision, some numbers at a time."""
    blocks = values.flatten().split(_BLOCK)
    total = sum(float(block.double().square().sum()) for block in blocks)
    return 0.5 * math.log(max(total / values.numel(), 1e-300))


def _constant(values: Tensor) -> bool:
    return bool((values == values.flatten()[0]).all())


def check_gradient_flow(model: Model, start: Tensor, x: Any) -> Any:
    """The outputs at one member's initial weights [P] and a few rows. Raises `ModelError` with the
    names of weights whose gradient is cut."""
    params = model.layout.unflatten(start)
    own = {k: v.detach() for k, v in params.items() if not k.startswith("likelihood.")}
    leaves = {k: v.detach().requires_grad_() for k, v in own.items()}
    with torch.enable_grad():
        f = model.forward(leaves, x)
    found = with_nan_weights(model, leaves, lambda: _gradients(leaves, f))
    if _has_nan(found):
        with torch.enable_grad():
            f = model.forward(leaves, x)
        if not _has_nan(_gradients(leaves, f)):
            raise ModelError(COMPUTED_AGAIN)
    suspects = _without_gradient(leaves, found)
    if suspects:
        _check_cut(model, own, suspects, x)
    return f


def _check_cut(model: Model, own: Params, suspects: list[str], x: Any) -> None:
    """Raise an error if the outputs change with weights that have no gradient."""
    before = _outputs(model, own, x)
    if not _same(before, _outputs(model, own, x)):
        return  # the network draws random numbers itself
    cut = [name for name in suspects if not _same(before, _outputs(model, _pushed(own, name), x))]
    if cut:
        raise ModelError(
            f"the outputs depend on {', '.join(map(repr, cut[:5]))} but have no gradient with "
            "respect to it: look for detach, torch.no_grad, .data, numpy or rounding; weights that "
            "are meant to be fixed need requires_grad_(False)"
        )


def _gradients(leaves: Params, f: Any) -> list[Tensor | None]:
    """The gradients of a function of the outputs f, which their graph is needed for once."""
    with torch.enable_grad():
        outputs = [leaf for leaf in tree_flatten(f)[0] if leaf.requires_grad]
        if not outputs:
            return [None] * len(leaves)
        total = torch.stack([f.double().square().sum() + f.double().sum() for f in outputs]).sum()
        return list(torch.autograd.grad(total, list(leaves.values()), allow_unused=True))


def with_nan_weights(
    model: Model, leaves: Mapping[str, Tensor], call: Callable[[], list[Tensor | None]]
) -> list[Tensor | None]:
    """The result of a call during which the network's own weights are NaN. A backward pass does not
    use them, unless it computes a part of the forward pass again."""
    nan = {
        k: v.new_full((), torch.nan, requires_grad=True).expand(v.shape) for k, v in leaves.items()
    }
    with model.turn:
        found: list[Tensor | None] = with_tensors(model.net, nan, call)
    return found


def check_own_weights(model: Model, call: Callable[[], list[Tensor | None]]) -> None:
    """Raise an error if gradients, which `call` computes in training, depend on the network's own
    weights. (A network may compute parts again in training alone.) Networks with `recompute` are
    not checked: their parts wait for the lock that is held here, in another thread on a GPU."""
    if model.recomputed:
        call()
        return
    own = {name: p.detach() for name, p in model.net.named_parameters() if p.requires_grad}
    if _has_nan(with_nan_weights(model, own, call)) and not _has_nan(call()):
        raise ModelError(COMPUTED_AGAIN)


def _has_nan(grads: list[Tensor | None]) -> bool:
    return any(grad is not None and bool(grad.isnan().any()) for grad in grads)


def _without_gradient(leaves: Params, grads: list[Tensor | None]) -> list[str]:
    """The names of weights without a gradient; all names if all gradients are zero."""
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
