"""The interface of every likelihood p(y | f), where f is the output of a network, and shape rules.

A likelihood is a frozen dataclass of settings. It holds no learned tensors: those are in `theta`, a
dict whose values have the shape [*lead, *own]. Shapes everywhere:

    f      [*lead, N, *output]         network outputs; `lead` is the number of axes before N
    y      [N, *event] or [*lead, N, *event]
    theta  {name: [*lead, *own]}, or [*own] for a value that all members share

This file also holds the checks of targets (`check_finite`, `check_whole`, `fit_event`), and the
tools of held-out calibration: `map_estimate` estimates one number of a likelihood on held-out rows,
and `significant_gain` decides whether the improvement is statistically significant.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from doxa.errors import DataError, ModelError, ShapeError, Unavailable, deprecated

if TYPE_CHECKING:
    from doxa.predictive.form import Form

Shape = tuple[int, ...]


def check_finite(y: Tensor) -> Tensor:
    """Return y as real, finite, floating targets of at least single precision, or raise."""
    if y.is_complex():
        raise DataError("targets must be real numbers, got a complex tensor")
    if not y.is_floating_point():
        y = y.to(torch.get_default_dtype())
    elif y.dtype in (torch.float16, torch.bfloat16):
        y = y.float()
    require(y, torch.isfinite(y), "is not finite: drop or impute such rows")
    return y


def check_whole(y: Tensor) -> Tensor:
    """Return y if all targets are finite whole numbers, of any dtype, or raise."""
    if y.is_floating_point():
        y = check_finite(y)
        require(y, y == y.round(), "is not a whole number")
    elif y.is_complex():
        raise DataError("targets must be real numbers, got a complex tensor")
    return y


def require(y: Tensor, good: Tensor, problem: str) -> None:
    """Raise a DataError that names the first target where `good` is False."""
    if bool(good.all()):
        return
    where = (~good).nonzero()[0].tolist()
    place = f"row {where[0]}" + (f", output {where[1:]}" if len(where) > 1 else "")
    raise DataError(f"target at {place} {problem} (it is {y[tuple(where)].item()})")


def as_tensor(y: Any) -> Tensor:
    if y is None:
        raise DataError("targets must be numbers, but y is None")
    try:
        array = np.asarray(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"targets must be numbers: {error}") from error
    if array.dtype.kind not in "biufc":
        raise DataError(f"targets must be numbers, not values of type {array.dtype}")
    return torch.tensor(array)


def fit_event(y: Tensor, event: Shape, output: Shape) -> Tensor:
    if y.ndim and tuple(y.shape[1:]) == event:
        return y
    if y.ndim == 1 and event == (1,):
        return y.unsqueeze(1)
    wanted = ", ".join(["N", *map(str, event)])
    given = ", ".join(["N", *map(str, output)])
    one_hot = not event and y.ndim > 1 and tuple(y.shape[1:]) == output
    raise ShapeError(
        f"targets have shape {list(y.shape)}; network outputs of shape [{given}] need targets of "
        f"shape [{wanted}]"
        + ("; convert one-hot rows to labels with y.argmax(1)" if one_hot else "")
    )


_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_CUTS = 18  # the bracket shrinks to 2e-4 of its first width


def log_mean_prob(each: Tensor) -> Tensor:
    """log of the mean probability over S functions, from log-probabilities [S, N] to [N], in
    float64."""
    return torch.logsumexp(each.double(), 0) - math.log(len(each))


def map_estimate(
    score: Callable[[float], Tensor],
    weight: Tensor,
    largest: float,
    prior_std: float,
    slope: float = 0.0,
) -> float:
    """argmax_u Σ_i w_i score(u)_i + slope u − u²/(2 prior_std²), in [−largest, largest], by golden
    section."""

    def value(u: float) -> float:
        return float((weight * score(u)).sum()) + slope * u - 0.5 * (u / prior_std) ** 2

    low, high = -largest, largest
    cut = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    at = [value(u) for u in cut]
    for _ in range(_CUTS):
        if at[0] >= at[1]:
            high, cut[1], at[1] = cut[1], cut[0], at[0]
            cut[0] = high - _GOLDEN * (high - low)
            at[0] = value(cut[0])
        else:
            low, cut[0], at[0] = cut[0], cut[1], at[1]
            cut[1] = low + _GOLDEN * (high - low)
            at[1] = value(cut[1])
    return 0.5 * (low + high)


def significant_gain(gain: Tensor, weight: Tensor, errors: float) -> bool:
    """Whether the sum of the gains [N] is more than `errors` of its standard errors above zero.

    Near the optimum of one number, a gain of k standard errors means that the number differs from
    its default by 2k of its own standard errors.
    """
    mean = (weight * gain).sum() / weight.sum()
    error = (weight * (gain - mean)).square().sum().sqrt()
    return bool((weight * gain).sum() > errors * error)


Theta = Mapping[str, Tensor]


class CalibratedLikelihood(NamedTuple):
    """The result of held-out calibration.

    likelihood: the calibrated likelihood, which replaces the one of the fit.
    message: the message for the log.
    moved: {name: number}: parameters that training learned and calibration renames; the number is
        added to the value.
    gain: how much the mean log-likelihood of the rows has gained; inf if it is not known.
    """

    likelihood: Likelihood
    message: str
    moved: Mapping[str, float] = MappingProxyType({})
    gain: float = math.inf


class Likelihood(ABC):
    """p(y | f), for any output shape.

    `log_prob`, `mean`, `variance` and `curvature` are pure tensor code: they can be
    differentiated, vmapped and traced.
    """

    name: ClassVar[str]
    discrete: ClassVar[bool] = False
    """y takes whole numbers only."""
    counts: ClassVar[bool] = False
    """y is a count: 0, 1, 2, … without an upper limit."""
    classifies: ClassVar[bool] = False
    """The mean is a table of class probabilities."""
    binary: ClassVar[bool] = False
    """Each output is the logit of a label 0 or 1, and the mean is P(y = 1)."""
    class_axis: ClassVar[bool] = False
    """The first axis of the outputs and of the mean are the classes; y does not have this axis."""
    scales_targets: ClassVar[bool] = False
    """y may be standardised before fitting."""
    link: ClassVar[str | None] = None
    """How one output per target gives its mean: "mean" (the mean itself), "logit", "softmax" or
    "log"; None: in another way. Simple models are compared with fits by it, so besides, at most one
    parameter may be learned, or for "mean" those of Gaussian and Student-t noise."""
    log_scales: ClassVar[tuple[str, ...]] = ()
    """Names in theta that are logarithms of a scale of y, which a fit may start at that of y."""
    heavy_tailed: ClassVar[bool] = False
    """y given f has heavier tails than a normal: errors are compared by probability, not by
    standard deviations."""
    predicts_noise: ClassVar[bool] = False
    """The noise of each row is an output of the network."""
    constants_per_run: ClassVar[bool] = False
    """The likelihoods of a grid of runs may differ in their `constants`."""
    per_output: bool = False
    """Each output has its own learned noise level."""
    ignore_index: int | None = None
    """The label that marks targets to be ignored; None where every target counts."""
    degrees_of_freedom_correction: ClassVar[float] = 0.0
    """The degrees-of-freedom correction: calibration of its log scales counts so many fewer
    held-out rows."""

    @property
    def heads(self) -> tuple[Likelihood, ...]:
        """The likelihood of each head; the likelihood itself where there is one."""
        return (self,)

    @property
    def assumed(self) -> bool:
        """Whether it was inferred from y, not given by the user."""
        return False

    @property
    def is_normal(self) -> bool:
        """y given f is normal with this `mean` and `variance`."""
        return False

    @property
    def integrates_normal(self) -> bool:
        """y is f plus normal noise of standard deviation exp(theta["log_noise"]), in fitted units.

        For normal f, y is normal too, and the variances add up.
        """
        return False

    @property
    def learns_noise(self) -> bool:
        """theta["log_noise"] is learned; it is the standard deviation of normal noise."""
        return False

    @property
    def tempered(self) -> bool:
        """The log-probabilities are weighted, so that exp(log_prob) is no density."""
        return False

    def untempered(self) -> Likelihood:
        """The same likelihood without weights: the one predictions are scored with."""
        return self

    def plain(self) -> Likelihood:
        """The likelihood as a function of `location` instead of f; for classes, at temperature
        1."""
        return self

    @property
    def calibrates_on_held_out(self) -> bool:
        """Whether a number of it is estimated on held-out rows, by `calibrate_held_out`."""
        return False

    def calibrate_held_out(
        self, f: Tensor, y: Tensor, theta: Theta, weight: Tensor, stopped: int = 1
    ) -> CalibratedLikelihood | None:
        """Calibrate p(y | f) on held-out rows. None where no significant change is needed.

        Parameters
        ----------
        f : Tensor
            Outputs [S, N, *output] of S functions, whose mixture predicts the held-out rows.
        y : Tensor
            Targets of the held-out rows, in fitted units, like f.
        theta : dict of Tensor
            Likelihood parameters of each function, [S, *own].
        weight : Tensor
            Weight of each row, [N].
        stopped : int
            The number of members whose training was stopped by some of these rows.
        """
        return None

    def left_out(self, *rows: Any, **options: Any) -> CalibratedLikelihood | None:
        """Deprecated: `calibrate_held_out`."""
        deprecated("Likelihood.left_out", "calibrate_held_out")
        return self.calibrate_held_out(*rows, **options)

    def arrange(self, f: Any) -> Any:
        """The outputs of a network [N, ...] in the layout [N, *output] of this likelihood."""
        return f

    def for_targets(self, y: Any, output: Any) -> Likelihood:
        """The likelihood with the settings that follow from the shape of y, where they were not
        given; `output` is the shape of the network's output for one row, as it is arranged now."""
        return self

    @abstractmethod
    def event(self, output: Shape) -> Shape:
        """Shape of one target, for one network output of shape `output`."""

    def outputs(self, y: Tensor) -> Shape:
        """The output shape that targets y [N, ...] need, for methods without a network."""
        return tuple(y.shape[1:]) or (1,)

    def prepare_targets(self, y: Any, output: Shape) -> Tensor:
        """Check targets, and convert them to the shape and dtype that `log_prob` expects.

        y of shape [N] becomes [N, 1] for a network with outputs [N, 1]; nothing else is reshaped.
        Regression targets keep their floating dtype (integers become the default one, half
        precision float32); binary labels and counts become the default floating dtype, classes
        int64. Raises ShapeError, or DataError naming the first row that cannot be used.
        """
        y = y if isinstance(y, Tensor) else as_tensor(y)
        return self._check(fit_event(y, self.event(output), output), output)

    def scalar_targets(self, y: Any, output: Any) -> Any:
        """Whether y was passed as [N] although one target has the shape [1]; a tuple for several
        heads. Predictions then have the shape [N], too."""
        return getattr(y, "ndim", None) == 1 and tuple(self.event(output)) == (1,)

    @abstractmethod
    def _check(self, y: Tensor, output: Shape) -> Tensor:
        """Check dtype and range of targets whose shape is right."""

    def parameters(self, output: Shape) -> dict[str, Tensor]:
        """Initial values of the learned parameters, unconstrained and in fitted units."""
        return {}

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        """The fixed parameters, which are not learned, in fitted units and float64.

        `scale` is the standardisation scale of y: (), [*event] or [runs, *event].
        """
        return {}

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """[*lead, N]: log p(y | f), summed over the event axes, constants included."""

    def location(self, f: Tensor, lead: int = 0) -> Tensor:
        """The function itself: f on its own scale (log rate, logits), in units of y."""
        return f

    def location_variance(self, variance: Tensor, lead: int = 0) -> Tensor:
        """The variance of `location` when f has this variance elementwise."""
        return variance

    @abstractmethod
    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """E[y | f]: [*lead, N, *event]; class probabilities for a categorical."""

    @abstractmethod
    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """Var[y | f], the aleatoric part, elementwise: shape of `mean`."""

    def constant(self, seen: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """log p(y), [N], under the best constant prediction for the targets `seen`.

        This is the baseline of a network. None where the likelihood has no such baseline. `weight`
        holds the weight of each seen target; the weights add up to the effective number of rows.
        None means 1 each.
        """
        if not self.scales_targets:
            return None
        seen, y = (t.double().reshape(len(t), -1) for t in (seen, y))
        if weight is None:
            middle, scale = seen.mean(0), seen.std(0, correction=0)
        else:
            share = (weight / weight.sum()).to(seen)
            middle = share @ seen
            scale = (share @ (seen - middle).square()).sqrt()
        z = (y - middle) / (scale := scale.clamp(min=torch.finfo(torch.float32).eps))
        return -(0.5 * z.square() + scale.log() + 0.5 * math.log(2 * math.pi)).sum(1)

    def constant_prediction(self, seen: Any, output: Shape) -> tuple[Likelihood, Tensor]:
        """The best prediction that ignores the inputs, which reports compare scores with.

        Parameters
        ----------
        seen : array
            Targets of the training rows, [N].
        output : tuple of int
            The output shape of the network.

        Returns
        -------
        likelihood : Likelihood
            A likelihood without learned parameters; by default a Gaussian.
        f : Tensor
            The constant that it takes: (), or [C] for classes.
        """
        from doxa.likelihoods.gaussian import Gaussian  # imported here: it imports this module

        numbers = np.asarray(seen)
        spread = max(float(numbers.std()), 1e-12)
        return Gaussian(noise=spread), torch.tensor(float(numbers.mean())).double()

    def predictive(
        self, f: Tensor, theta: Theta, weights: Tensor, f_variance: Tensor | None
    ) -> Form | None:
        """The predictive distribution, where the likelihood has a form of its own.

        A mixture density or an evidential output overrides this method and returns a subclass of
        `doxa.predictive.form.Form`. Everything is in fitted units: an `Affine` around the
        likelihood converts the form to units of y. Moments that are accumulated over chunks of
        draws (`keep="moments"`) do not use this form, but `mean`, `variance` and `entropy`.

        Parameters
        ----------
        f : Tensor
            Outputs of S functions, [S, N, *output].
        theta : dict of Tensor
            Likelihood parameters of each function, [S, *own].
        weights : Tensor
            The weight of each function, [S]; the weights sum to 1.
        f_variance : Tensor or None
            Only if `integrates_normal`: the variances of Gaussians over f, [S, N, *output].

        Returns
        -------
        Form or None
            None: the mixture of p(y | f) over the functions.
        """
        return None

    @abstractmethod
    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """H[y | f] for each element of the event, in nats: [*lead, N, *event]."""

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """P(Y <= y | f) elementwise: [*lead, N, *event]."""
        raise Unavailable(f"a {self.name} likelihood has no cumulative distribution function")

    @abstractmethod
    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        """One draw of y for every f: [*lead, N, *event]."""

    @abstractmethod
    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        """The Fisher information E_y[s s^T] of s = d log p(y | f) / df: [*lead, N, O, O].

        The outputs are flattened to O. It is E_y[-d2 log p(y | f) / df df] where log p is smooth in
        f: the matrix of generalised Gauss-Newton, positive semi-definite. For Gaussian, Bernoulli,
        categorical and Poisson it is the exact negative Hessian. `y` is used only where targets
        have weights or are ignored.
        """

    def curvature_diagonal(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor | None:
        """The diagonal of `curvature`, in the shape of f; None where it is no diagonal matrix."""
        return None

    def curvature_draw(
        self, f: Any, theta: Theta, signs: Any, lead: int = 0, y: Any = None
    ) -> Tensor:
        """R v with R Rᵀ = `curvature`, flat, [*lead, N, O], for signs v in the shape of f.

        With independent random signs, R v has mean zero and the covariance `curvature`, as the
        score of a label drawn from p(y | f) has. It varies less: where one class has probability
        1 − ε, the square of a drawn label's score has the relative variance 1/ε, and that of R v
        less than 2. By default R is a Cholesky factor; where the matrix is large (one output for
        each pixel), a likelihood should override this method, or `curvature_diagonal`.
        """
        own = self.curvature_diagonal(f, theta, lead)
        if own is not None:
            scaled: Tensor = own.sqrt() * signs
            return scaled.flatten(lead + 1)
        c = self.curvature(f, theta, lead, y).double()
        jitter = 1e-13 * c.diagonal(dim1=-2, dim2=-1) + torch.finfo(c.dtype).tiny
        root, failed = torch.linalg.cholesky_ex(c + torch.diag_embed(jitter))
        if failed.any():
            values, vectors = torch.linalg.eigh(c)
            root = vectors * values.clamp_min(0.0).sqrt()[..., None, :]
        drawn: Tensor = (root @ signs.flatten(lead + 1).to(root.dtype).unsqueeze(-1)).squeeze(-1)
        return drawn.to(f.dtype)

    def entropy_of(self, probs: Tensor, lead: int = 0) -> Tensor:
        """The entropy of given class probabilities; classification only."""
        raise Unavailable(f"a {self.name} likelihood has no class probabilities")

    def logits(self, probs: Tensor, lead: int = 0) -> Tensor:
        """An f whose mean is `probs`; classification only."""
        raise Unavailable(f"a {self.name} likelihood has no class probabilities")


def per_row(
    value: Tensor, own: int, f: Tensor, lead: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Reshape a value [*lead, *own] or [*own] to broadcast against f [*lead, N, *event], in the
    dtype of f.

    `own` is the number of axes of the value besides `lead`: 0, or those of the event.
    """
    value = value.to(f.dtype if dtype is None else dtype)
    if value.ndim in (0, own):
        return value
    if value.ndim != lead + own:
        raise ShapeError(
            f"a likelihood parameter of shape {tuple(value.shape)} does not fit outputs of shape "
            f"{tuple(f.shape)} with {lead} leading axes"
        )
    rest = f.ndim - lead - 1 - own
    return value.reshape(value.shape[:lead] + (1,) + value.shape[lead:] + (1,) * rest)


def check_match(f: Tensor, y: Tensor, lead: int) -> None:
    """Targets are never broadcast against outputs, except over the leading axes."""
    if y.shape[max(y.ndim - f.ndim + lead, 0) :] != f.shape[lead:]:
        raise ShapeError(
            f"targets of shape {tuple(y.shape)} do not fit outputs of shape {tuple(f.shape)} "
            f"with {lead} leading axes"
        )


def sum_event(values: Tensor, lead: int) -> Tensor:
    """[*lead, N, *event] to [*lead, N]."""
    event = values.shape[lead + 1 :]
    if math.prod(event) == 1:
        return values.reshape(values.shape[: lead + 1])
    return values.sum(dim=tuple(range(lead + 1, values.ndim)))


def diagonal(values: Tensor, lead: int) -> Tensor:
    """[*lead, N, *output] to the diagonal matrices [*lead, N, O, O]."""
    size = math.prod(values.shape[lead + 1 :])
    return torch.diag_embed(values.reshape((*values.shape[: lead + 1], size)))


def uniform(like: Tensor, shape: Shape, generator: Generator) -> Tensor:
    """Uniforms in (0, 1), drawn on the generator's device, then moved."""
    draws = torch.rand(shape, generator=generator, dtype=like.dtype, device=generator.device)
    return draws.clamp_min_(torch.finfo(like.dtype).tiny).to(like.device)


def normal(like: Tensor, shape: Shape, generator: Generator) -> Tensor:
    """Standard normals, drawn on the generator's device, then moved."""
    draws = torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device)
    return draws.to(like.device)


def positive(what: str, value: Any) -> Any:
    """Check a setting that must be positive: a float, or nested tuples of floats; None is
    allowed."""
    if value is None:
        return None
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor(math.nan)
    if numbers.numel() == 0 or not bool((torch.isfinite(numbers) & (numbers > 0)).all()):
        raise ModelError(f"{what} must be positive and finite, got {value!r}")
    return _as_tuple(numbers.tolist())


def log_constant(what: str, value: Any, event: Shape, scale: Tensor | None) -> Tensor:
    """log of a fixed standard deviation in fitted units: [*event], or [runs, *event]."""
    numbers = torch.tensor(value, dtype=torch.float64)
    if numbers.ndim and tuple(numbers.shape) != event:
        raise ModelError(
            f"{what} has shape {tuple(numbers.shape)}, but one target has shape {event}: "
            "give one number, or one for each output"
        )
    numbers = numbers.expand(event)
    if scale is not None:
        numbers = numbers.to(scale.device) / scale.to(torch.float64)
    return numbers.log()


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(part) for part in value) if isinstance(value, list) else value
