"""A likelihood by its name, or inferred from the type and values of y and the shape of the outputs.

    y                                 outputs       likelihood
    integers [N, *site]               [N, K, *site] categorical
    integers 0 and 1, truth values    as y          bernoulli
    whole floats 0 … K−1, [N, *site]  [N, K, *site] an error: numbers or classes?
    floats 0.0 and 1.0, one-hot rows  as y          gaussian, with a warning
    anything else                                   gaussian

What is not Gaussian is said as a warning, so that it is seen; what is given is never looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.errors import ModelError, ShapeError
from doxa.likelihoods.base import Likelihood
from doxa.likelihoods.classes import Bernoulli, Categorical
from doxa.likelihoods.compose import Heads
from doxa.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian, StudentT
from doxa.likelihoods.poisson import Poisson

LIKELIHOODS: dict[str, type[Likelihood]] = {
    kind.name: kind
    for kind in (Gaussian, HeteroscedasticGaussian, StudentT, Bernoulli, Categorical, Poisson)
}

_GLANCE = 1000  # rows that settle most cases: all of them are looked at where these do not


class Inferred(NamedTuple):
    """A likelihood's name, why it was chosen (empty: there was no doubt), what to do about it, and
    how loud to say so."""

    name: str
    reason: str = ""
    advice: str = ""
    level: int = logging.WARNING

    @property
    def said(self) -> str:
        return f"{self.name}, because {self.reason}" if self.reason else ""


def infer(y: Any, output: Any, complete: bool = True) -> Inferred:
    """The likelihood of targets [N, …] for outputs of shape `output` a row.

    `complete` says that y holds all rows; those of a stream are not judged by the first ones.
    """
    if output and isinstance(output[0], tuple):
        raise ModelError(
            f"the network gives {len(output)} outputs: give a likelihood for each, like "
            'likelihood=("gaussian", "categorical")'
        )
    if not isinstance(y, Tensor) or y.ndim == 0:
        return Inferred("gaussian")
    whole = not y.is_floating_point()
    event = tuple(y.shape[1:])
    if event == output or (event, output) == ((), (1,)):
        return _of_outputs_shape(y, whole, complete)
    several = bool(output) and output[0] >= 2
    if several and whole and event in (output[1:], (*output[1:], 1)):
        reason = f"y holds whole numbers and the network has {output[0]} outputs"
        return Inferred("categorical", reason, _said_by("categorical"))
    if several and event == output[1:] and complete and _are_classes(y, output[0]):
        raise ShapeError(
            f"y holds whole numbers 0 … {output[0] - 1} as floats and the network has {output[0]} "
            'outputs: say likelihood="categorical" if they are classes (integers would have been '
            f"taken for them); numbers need y of shape [N, {', '.join(map(str, output))}]"
        )
    return Inferred("gaussian")


def _of_outputs_shape(y: Tensor, whole: bool, complete: bool) -> Inferred:
    """One target for each output: a number, or a yes or no."""
    truth = y.dtype == torch.bool
    if whole and not truth and not complete:
        return _uncertain("y holds whole numbers, of which a stream shows the first", "bernoulli")
    if not truth and not _are_yes_or_no(y):
        counts = "y holds whole numbers, one for each output, and not only 0 and 1"
        return Inferred("gaussian", counts if whole else "", level=logging.INFO)
    if complete and y[0].numel() > 1 and bool((y.flatten(1).sum(1) == 1).all()):
        return _uncertain("each row of y holds one 1", "categorical", " with y.argmax(1)")
    if whole:
        kind = "truth values" if truth else "0 and 1 only"
        return Inferred("bernoulli", f"y holds {kind}, one for each output", _said_by("bernoulli"))
    return _uncertain("y holds floats, though 0 and 1 only", "bernoulli")


def _uncertain(reason: str, other: str, how: str = "") -> Inferred:
    advice = f'say likelihood="{other}"{how} if they are classes, likelihood="gaussian" if numbers'
    return Inferred("gaussian", reason, advice)


def _said_by(name: str) -> str:
    return f'likelihood="{name}" says so without this line'


def _are_yes_or_no(y: Tensor) -> bool:
    """0 and 1, both of them, and nothing else."""
    return _vary_in(y, lambda part: (part == 0) | (part == 1))


def _are_classes(y: Tensor, classes: int) -> bool:
    """Whole numbers below the number of classes, more than one of them."""
    return _vary_in(y, lambda part: (part == part.round()) & (part >= 0) & (part < classes))


def _vary_in(y: Tensor, test: Callable[[Tensor], Tensor]) -> bool:
    """All values pass, and they are not all the same."""
    passed = all(bool(test(part).all()) for part in (y[:_GLANCE], y))
    return passed and bool((y != y.flatten()[:1]).any())


def assumed(name: str) -> Likelihood:
    """The likelihood of a name that nobody asked for: rows left out may say another."""
    return Gaussian(assumed=True) if name == "gaussian" else likelihood(name)


def likelihood(spec: str | Likelihood | Sequence[str | Likelihood]) -> Likelihood:
    """A likelihood from its name, itself, or a sequence of either: one for each head."""
    if isinstance(spec, Likelihood):
        return spec
    if isinstance(spec, str):
        if spec not in LIKELIHOODS:
            known = ", ".join(sorted(LIKELIHOODS))
            raise ModelError(f"no likelihood is called {spec!r}; there are {known}")
        return LIKELIHOODS[spec]()
    if isinstance(spec, tuple | list):
        return Heads(tuple(likelihood(part) for part in spec))
    if isinstance(spec, type) and issubclass(spec, Likelihood):
        raise ModelError(f"a likelihood is a name or an object: {spec.__name__}(), not its class")
    raise ModelError(f"a likelihood is a name or an object, got {type(spec).__name__}")
