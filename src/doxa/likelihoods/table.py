"""The table of likelihoods, and the choice of one by its name or from the targets.

`LIKELIHOODS` is the table. The names that `fit`, the estimators and the command line accept, the
targets that `doxa fit` reads, saved artefacts and the tests all use it. What other parts of doxa
need to know about a likelihood, it declares itself: see `Likelihood`.

Where no likelihood is given, `infer` chooses one by the type and values of y and the output shape:

    y                                 outputs       likelihood
    integers [N, *site]               [N, K, *site] categorical
    integers [N, *site]               [N, *site, K] categorical, with the classes last
    integers 0 and 1, truth values    as y          bernoulli
    whole floats 0 … K−1, [N, *site]  [N, K, *site] an error: numbers or classes?
    floats 0.0 and 1.0, one-hot rows  as y          gaussian, with a warning
    anything else                                   gaussian

A result that is not Gaussian is logged as a warning, so that users notice it. A likelihood that the
user gives is never checked against these rules.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.errors import ModelError, ShapeError, deprecated
from doxa.likelihoods.base import Likelihood
from doxa.likelihoods.classes import Bernoulli, Categorical
from doxa.likelihoods.compose import Heads
from doxa.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian, StudentT
from doxa.likelihoods.laplace_noise import LaplaceNoise
from doxa.likelihoods.negative_binomial import Counts, NegativeBinomial
from doxa.likelihoods.poisson import Poisson

LIKELIHOODS: dict[str, type[Likelihood]] = {
    kind.name: kind
    for kind in (
        Gaussian,
        HeteroscedasticGaussian,
        StudentT,
        LaplaceNoise,
        Poisson,
        NegativeBinomial,
        Counts,
        Bernoulli,
        Categorical,
    )
}


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


def assumed(name: str) -> Likelihood:
    """The likelihood of a name that was inferred, not given: held-out calibration may replace
    it."""
    return Gaussian(assumed=True) if name == "gaussian" else likelihood(name)


_FIRST_ROWS = 1000  # the first rows decide most cases; all rows are read only where they do not


class Inferred(NamedTuple):
    """The name of the likelihood, the reason (empty where the case is clear), advice for the user,
    and the log level of the message."""

    name: str
    reason: str = ""
    advice: str = ""
    level: int = logging.WARNING

    @property
    def message(self) -> str:
        return f"{self.name}, because {self.reason}" if self.reason else ""

    @property
    def said(self) -> str:
        """Deprecated: `message`."""
        deprecated("Inferred.said", "Inferred.message")
        return self.message


def infer(y: Any, output: Any, complete: bool = True) -> Inferred:
    """The likelihood of targets [N, …] for outputs of shape `output` per row.

    `complete` is True where y holds all rows. The first rows of a stream are not enough to decide.
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
        return Inferred("categorical", reason, _to_silence("categorical"))
    if whole and len(output) > 1 and output[-1] >= 2 and event == output[:-1]:
        reason = (
            f"y holds whole numbers and the network has {output[-1]} outputs at each of "
            f"{math.prod(event)} positions"
        )
        return Inferred("categorical", reason, _to_silence("categorical"))
    if several and event == output[1:] and complete and _are_classes(y, output[0]):
        raise ShapeError(
            f"y holds whole numbers 0 … {output[0] - 1} as floats and the network has {output[0]} "
            'outputs: pass likelihood="categorical" if they are classes (integers would have been '
            f"taken for them); numbers need y of shape [N, {', '.join(map(str, output))}]"
        )
    return Inferred("gaussian")


def _of_outputs_shape(y: Tensor, whole: bool, complete: bool) -> Inferred:
    """The case of one target for each output: a number, or a binary label."""
    truth = y.dtype == torch.bool
    if whole and not truth and not complete:
        reason = "y holds whole numbers, of which only the first rows of the stream are known"
        return _uncertain(reason, "bernoulli")
    if not truth and not _are_yes_or_no(y):
        counts = "y holds whole numbers, one for each output, and other values than 0 and 1"
        advice = 'pass likelihood="counts" if they count something' if whole else ""
        return Inferred("gaussian", counts if whole else "", advice, logging.INFO)
    if complete and y[0].numel() > 1 and bool((y.flatten(1).sum(1) == 1).all()):
        return _uncertain("each row of y holds one 1", "categorical", " with y.argmax(1)")
    if whole:
        kind = "truth values" if truth else "0 and 1 only"
        return Inferred(
            "bernoulli", f"y holds {kind}, one for each output", _to_silence("bernoulli")
        )
    return _uncertain("y holds floats, but only 0 and 1", "bernoulli")


def _uncertain(reason: str, other: str, how: str = "") -> Inferred:
    advice = f'pass likelihood="{other}"{how} if they are classes, likelihood="gaussian" if numbers'
    return Inferred("gaussian", reason, advice)


def _to_silence(name: str) -> str:
    return f'pass likelihood="{name}" to avoid this message'


def _are_yes_or_no(y: Tensor) -> bool:
    """Whether y holds both 0 and 1, and no other value."""
    return _vary_in(y, lambda part: (part == 0) | (part == 1))


def _are_classes(y: Tensor, classes: int) -> bool:
    """Whether y holds whole numbers below the number of classes, at least two different ones."""
    return _vary_in(y, lambda part: (part == part.round()) & (part >= 0) & (part < classes))


def _vary_in(y: Tensor, test: Callable[[Tensor], Tensor]) -> bool:
    """Whether all values pass the test, and at least two of them differ."""
    passed = all(bool(test(part).all()) for part in (y[:_FIRST_ROWS], y))
    return passed and bool((y != y.flatten()[:1]).any())
