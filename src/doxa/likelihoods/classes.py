"""Likelihoods of classes: a binary label for each output (Bernoulli), or one class of several.

Bernoulli     log p = log sigmoid(f/T) if y = 1, log sigmoid(-f/T) if y = 0
categorical   log p = f_y/T - logsumexp(f/T)

Outputs are logits, divided by a temperature T. Reported logits are always f/T.

T is 1 unless the user gives it, or held-out calibration estimates it (`calibrate_held_out`; Guo,
Pleiss, Sun and Weinberger 2017, who hold these rows out of everything). The estimate maximises the
likelihood of the held-out rows under the prior

    log T ~ N(0, 0.35²)

plus a term log T for each member. This term corrects a bias: early stopping used the same rows to
choose where training ends, which makes a network look better than it is. The slope of the
log-likelihood along log T is therefore lower than on new rows, by about 1 per member. On 28 tables,
the mean difference was, for an ensemble of five, 4.5 with fewer than 500 rows and 6.5 with more;
for one network 1.5 and 2.0, for dropout 1.2 and 1.5, for `mean-field` 0.1 and 0.6.

T stays 1 unless the gain, including that term, is significant. A gain of k of its standard errors
corresponds to a log T of 2k of its own standard errors. Overconfidence has an unbounded cost, so
that T > 1 needs half a standard error of log T, and T < 1 needs two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid

from doxa.errors import ModelError, ShapeError
from doxa.likelihoods.base import (
    CalibratedLikelihood,
    Likelihood,
    Shape,
    Theta,
    check_match,
    check_whole,
    diagonal,
    log_mean_prob,
    map_estimate,
    positive,
    require,
    significant_gain,
    sum_event,
    uniform,
)

log = logging.getLogger("doxa")

_IGNORED = -100  # the label of what is ignored in torch and transformers
_TO_IGNORE = "; pass likelihood=Categorical(ignore_index=-100) to ignore such targets"
_MOST = math.log(5.0)  # largest |log T|
_SPREAD = 0.35  # prior standard deviation of log T
_SLOPE = 1.0  # correction for each member whose training these rows have stopped
_ERRORS = {True: 0.25, False: 1.0}  # standard errors of the gain that T > 1 and T < 1 need


@dataclass(frozen=True)
class Classes(Likelihood):
    """Classes: each output is a logit.

    Parameters
    ----------
    temperature
        A number; or None: 1 in training, and then estimated on held-out rows.
    """

    discrete: ClassVar[bool] = True
    classifies: ClassVar[bool] = True

    temperature: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        given = positive("temperature", self.temperature)
        if isinstance(given, tuple):
            raise ModelError(f"temperature must be one number, got {self.temperature!r}")
        object.__setattr__(self, "temperature", given)

    @property
    def calibrates_on_held_out(self) -> bool:
        return self.temperature is None and not self.tempered

    def calibrate_held_out(
        self, f: Tensor, y: Tensor, theta: Theta, weight: Tensor, stopped: int = 1
    ) -> CalibratedLikelihood | None:
        """The likelihood at the temperature that is estimated on held-out rows."""

        def score(log_t: float) -> Tensor:
            tempered = replace(self, temperature=math.exp(log_t))
            return log_mean_prob(tempered.log_prob(f, y, theta, 1))

        slope = _SLOPE * stopped
        log_t = map_estimate(score, weight, _MOST, _SPREAD, slope)
        lacking = slope * log_t / weight.sum()
        gained = score(log_t) - score(0.0)
        if not significant_gain(gained + lacking, weight, _ERRORS[log_t > 0]):
            return None
        t = math.exp(log_t)
        message = f"{self.name} at temperature {t:.3g}"
        gain = max(0.0, float((weight * gained).sum() / weight.sum()))
        return CalibratedLikelihood(replace(self, temperature=t), message, gain=gain)

    def plain(self) -> Likelihood:
        return self if self.temperature is None else replace(self, temperature=None)

    def location(self, f: Tensor, lead: int = 0) -> Tensor:
        return f if self.temperature is None else f / self.temperature

    def location_variance(self, variance: Tensor, lead: int = 0) -> Tensor:
        return variance if self.temperature is None else variance / self.temperature**2


def _counts(seen: Tensor, weight: Tensor | None) -> Tensor:
    """The weight of each target, in the shape of the targets."""
    each = torch.ones(len(seen), dtype=torch.float64) if weight is None else weight.double()
    return each.to(seen.device).reshape(-1, *(1,) * (seen.ndim - 1)).expand(seen.shape)


def _shares(seen: Any, classes: int) -> Tensor:
    """The share of each class, [C], with one row added to each."""
    counts = np.bincount(np.asarray(seen).astype(int), minlength=classes) + 1.0
    return torch.as_tensor(counts / counts.sum())


def entropy_terms(probs: Tensor) -> Tensor:
    """-p log p, which is 0 at p = 0."""
    terms: Tensor = torch.special.entr(probs)
    return terms


def _softmax_is_slow(f: Tensor, axis: int) -> bool:
    """Whether logsumexp is faster than softmax here.

    PyTorch's CPU kernels do not vectorise rows shorter than a register. With 8 to 15 classes they
    are 2 to 5 times slower than logsumexp; with 16 or more they are 2 times faster.
    """
    return f.device.type == "cpu" and axis == f.ndim - 1 and f.shape[axis] < 16


def softmax(f: Tensor, axis: int) -> Tensor:
    if _softmax_is_slow(f, axis):
        return (f - torch.logsumexp(f, axis, keepdim=True)).exp()
    return torch.softmax(f, axis)


@dataclass(frozen=True)
class Bernoulli(Classes):
    """Each output is the logit of y = 1; targets are 0 or 1 and have the shape of the outputs."""

    name: ClassVar[str] = "bernoulli"
    link: ClassVar[str | None] = "logit"
    binary: ClassVar[bool] = True

    def event(self, output: Shape) -> Shape:
        return tuple(output)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        y = check_whole(y)
        require(y, (y == 0) | (y == 1), "is neither 0 nor 1")
        return y.to(torch.get_default_dtype())

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        check_match(f, y, lead)
        return sum_event(logsigmoid((2.0 * y - 1.0).to(f.dtype) * self.location(f)), lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return torch.sigmoid(self.location(f))

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        f = self.location(f)
        return torch.sigmoid(f) * torch.sigmoid(-f)

    def constant(self, seen: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        each = _counts(seen, weight)
        share = ((each * seen).sum(0) + 1) / (each.sum(0) + 2)
        return torch.where(y > 0, share, 1 - share).log().reshape(len(y), -1).sum(1)

    def constant_prediction(self, seen: Any, output: Shape) -> tuple[Likelihood, Tensor]:
        shares = _shares(seen, 2)
        return Bernoulli(), (shares[1] / shares[0]).log()

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self.entropy_of(self.mean(f, theta, lead), lead)

    def entropy_of(self, probs: Tensor, lead: int = 0) -> Tensor:
        return entropy_terms(probs) + entropy_terms(1.0 - probs)

    def logits(self, probs: Tensor, lead: int = 0) -> Tensor:
        return (probs.log() - torch.log1p(-probs)) * (self.temperature or 1.0)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        yes = self.mean(f, theta, lead)
        return (uniform(f, tuple(f.shape), generator) < yes).to(f.dtype)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        return diagonal(self.curvature_diagonal(f, theta, lead), lead)

    def curvature_diagonal(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self.location_variance(self.variance(f, theta, lead))


@dataclass(frozen=True)
class Categorical(Classes):
    """One of C classes: outputs are logits [N, C, *site], targets classes [N, *site].

    Parameters
    ----------
    ignore_index
        Targets with this value are ignored (unlabelled pixels, padded tokens).
    class_weight
        One positive weight for each class, multiplying log p(y | f) where y is that class. The
        likelihood is then tempered: it is not a density, and predictions are scored without
        weights.
    classes_last
        True: the network returns logits [N, *site, C], as language models do. They are arranged to
        [N, C, *site] as they leave the network: probabilities, samples and the f of a `Predictive`
        have the classes first in any case. None: `fit` finds the axis by the shape of y, and takes
        the first if both fit.
    """

    name: ClassVar[str] = "categorical"
    link: ClassVar[str | None] = "softmax"
    class_axis: ClassVar[bool] = True

    ignore_index: int | None = None
    class_weight: Sequence[float] | None = None
    classes_last: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes_last not in (None, True, False):
            raise ModelError(f"classes_last is True, False or None, got {self.classes_last!r}")
        weight = positive("class_weight", self.class_weight)
        if isinstance(weight, float):
            raise ModelError("class_weight must be one weight for each class")
        object.__setattr__(self, "class_weight", weight)

    @property
    def tempered(self) -> bool:
        return self.class_weight is not None

    def untempered(self) -> Likelihood:
        return replace(self, class_weight=None) if self.tempered else self

    def arrange(self, f: Tensor) -> Tensor:
        moved = self.classes_last and isinstance(f, Tensor) and f.ndim > 2
        return f.movedim(-1, 1) if moved else f

    def for_targets(self, y: Any, output: Any) -> Likelihood:
        if self.classes_last is not None or len(output) < 2 or not isinstance(y, Tensor):
            return self
        event = tuple(y.shape[1:])
        if event == output[1:]:
            if event == output[:-1]:
                log.warning(
                    "likelihood: outputs of shape %s may have their classes on the first or on the "
                    "last axis; the first is taken: pass Categorical(classes_last=True) for logits "
                    "[N, *site, C], as those of language models, or False to avoid this message",
                    [*output],
                )
            return self
        return replace(self, classes_last=True) if event == output[:-1] else self

    def event(self, output: Shape) -> Shape:
        if not output or output[0] < 2:
            raise ModelError(
                "a categorical likelihood needs one output for each class, two or more, on the "
                f"first axis, got outputs of shape {tuple(output)}; for one logit use Bernoulli"
            )
        if self.class_weight is not None and len(self.class_weight) != output[0]:
            raise ModelError(
                f"class_weight has {len(self.class_weight)} weights for {output[0]} classes"
            )
        return tuple(output[1:])

    def outputs(self, y: Tensor) -> Shape:
        """The number of class weights, or the largest class in y plus one."""
        if self.class_weight is not None:
            return (len(self.class_weight), *y.shape[1:])
        counted = check_whole(y)
        if self.ignore_index is not None:
            counted = counted[counted != self.ignore_index]
        most = int(counted.max()) if counted.numel() else 0
        return (max(2, most + 1), *y.shape[1:])

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        y = check_whole(y).long()
        known = (y >= 0) & (y < output[0])
        if self.ignore_index is not None:
            known = known | (y == self.ignore_index)
        ignored = "" if bool((known | (y != _IGNORED)).all()) else _TO_IGNORE
        require(y, known, f"is not a class of the network's {output[0]} outputs{ignored}")
        return y

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        if self.class_weight is None:
            return {}
        return {"class_weight": torch.tensor(self.class_weight, dtype=torch.float64)}

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        axis = lead + 1
        sites = f.shape[:axis] + f.shape[axis + 1 :]
        if y.shape[max(y.ndim - len(sites) + lead, 0) :] != sites[lead:]:
            raise ShapeError(
                f"classes of shape {tuple(y.shape)} do not fit logits of shape {tuple(f.shape)} "
                f"with {lead} leading axes"
            )
        index, weight = self._index_and_weight(y, f, theta)
        f = self.location(f)
        if self.classes_last:  # as the network returns it, f is contiguous along this axis
            f, axis = f.movedim(axis, -1), f.ndim - 1
        chosen = index.expand(sites).unsqueeze(axis)
        if _softmax_is_slow(f, axis):
            each = f.gather(axis, chosen).squeeze(axis) - torch.logsumexp(f, axis)
        else:
            each = torch.log_softmax(f, axis).gather(axis, chosen).squeeze(axis)
        return sum_event(each if weight is None else each * weight, lead)

    def constant(self, seen: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        skipped = (y == self.ignore_index) if self.ignore_index is not None else y < 0
        each = _counts(seen, weight)
        if self.ignore_index is not None:
            each, seen = each[seen != self.ignore_index], seen[seen != self.ignore_index]
        classes = 1 + max(int(seen.max()), int(y[~skipped].max()) if (~skipped).any() else 0)
        counts = torch.bincount(seen.flatten(), each.flatten(), minlength=classes)
        shares = (counts + 1) / (counts.sum() + classes)
        each = shares.log()[torch.where(skipped, 0, y)].masked_fill(skipped, 0.0)
        return each.reshape(len(y), -1).sum(1)

    def constant_prediction(self, seen: Any, output: Shape) -> tuple[Likelihood, Tensor]:
        shares = _shares(seen, output[0])
        return Categorical(), (shares / shares.sum()).log()

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return softmax(self.location(f), lead + 1)

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        probs = self.mean(f, theta, lead)
        return probs * (1.0 - probs)

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self.entropy_of(self.mean(f, theta, lead), lead)

    def entropy_of(self, probs: Tensor, lead: int = 0) -> Tensor:
        return entropy_terms(probs).sum(lead + 1)

    def logits(self, probs: Tensor, lead: int = 0) -> Tensor:
        return probs.log() * (self.temperature or 1.0)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        axis = lead + 1
        below = self.mean(f, theta, lead).cumsum(axis)
        shape = tuple(f.shape[:axis] + f.shape[axis + 1 :])
        threshold = uniform(f, shape, generator).unsqueeze(axis)
        # The last cumulative sum may round below 1. It is not used, so that no draw exceeds it.
        return (below.narrow(axis, 0, f.shape[axis] - 1) < threshold).sum(axis)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        """(diag(p) - p p^T)/T^2 at each site, times the weight of y there.

        Without y, a class-weighted likelihood uses the expected weight.
        """
        axis = lead + 1
        classes, site = f.shape[axis], f.shape[axis + 1 :]
        count = math.prod(site)
        probs = self.mean(f, theta, lead).reshape((*f.shape[:axis], classes, count))
        probs = probs.transpose(-1, -2)
        blocks = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
        blocks = self.location_variance(blocks)
        if y is not None:
            weight = self._index_and_weight(y, f, theta)[1]
            if weight is not None:
                rows = weight.reshape((*weight.shape[: weight.ndim - len(site)], count))
                blocks = blocks * rows[..., None, None]
        elif self.class_weight is not None:
            blocks = blocks * (probs @ self._weights(f, theta))[..., None, None]
        if count == 1:
            return blocks.squeeze(axis)
        full = torch.diag_embed(blocks.movedim(axis, -1))  # [*lead, N, C, C, sites, sites]
        size = classes * count
        return full.transpose(-2, -3).reshape((*f.shape[:axis], size, size))

    def curvature_draw(
        self, f: Tensor, theta: Theta, signs: Tensor, lead: int = 0, y: Tensor | None = None
    ) -> Tensor:
        """(√p v − p √pᵀv)/T at each site, times the square root of the weight of y there.

        R = diag(√p) − p √pᵀ is a root of diag(p) − p pᵀ, because p sums to one.
        """
        axis = lead + 1
        probs = self.mean(f, theta, lead)
        part = probs.sqrt() * signs
        drawn = (part - probs * part.sum(axis, keepdim=True)) / (self.temperature or 1.0)
        weight = None
        if y is not None:
            weight = self._index_and_weight(y, f, theta)[1]
        elif self.class_weight is not None:
            weight = probs.movedim(axis, -1) @ self._weights(f, theta)
        if weight is not None:
            drawn = drawn * weight.sqrt().unsqueeze(weight.ndim - (f.ndim - axis - 1))
        return drawn.flatten(axis)

    def _weights(self, f: Tensor, theta: Theta) -> Tensor:
        """The class weights [C], from theta, where they are already on the device: a copy from the
        host cannot be part of a CUDA graph. All members have the same weights."""
        if "class_weight" in theta:
            weight = theta["class_weight"].to(f.dtype)
            return weight.reshape(-1, weight.shape[-1])[0]
        return torch.tensor(self.class_weight, dtype=f.dtype, device=f.device)

    def _index_and_weight(self, y: Tensor, f: Tensor, theta: Theta) -> tuple[Tensor, Tensor | None]:
        """Valid class indices, and the weight of each target (None: 1 each)."""
        weight = None
        if self.ignore_index is not None:
            counted = y != self.ignore_index
            y, weight = torch.where(counted, y, 0), counted.to(f.dtype)
        if self.class_weight is not None:
            of_class = self._weights(f, theta)[y]
            weight = of_class if weight is None else weight * of_class
        return y, weight
