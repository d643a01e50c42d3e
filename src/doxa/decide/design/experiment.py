"""An experiment: the prior of θ, the likelihood of outcomes given a design, and the designs.

    θ ~ p(θ),   y ~ p(y | θ, d),   d in a space

The likelihood is written for arrays that broadcast: θ is [..., *shape of θ] and d is
[..., *shape of d], with any axes in front, and the distribution that comes back has those axes in
front. One call then evaluates all draws under all designs.

The space of designs is a list of choices, a box, or a sequence of these. The file ends with
experiments from the literature.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributions as D
from torch.distributions import Bernoulli, Independent, Normal

from doxa import checks
from doxa.decide.design.distributions import ParameterDistribution, as_distribution
from doxa.decide.design.draws import draw, from_uniform, outcomes_of, unchecked, uniform
from doxa.errors import DataError, MethodError, NumericalError, ShapeError

log = logging.getLogger("doxa")
MOST_LISTED = 20_000  # designs of a sequence that are all compared
_BLOCK = 1 << 22  # distances held at a time
_SWEEPS = 10


def compared(space: Space, points: int) -> tuple[Tensor, bool]:
    """The designs of a space that are compared, and whether they are a part of a finite list. In
    that case a warning is logged, and the best design is to be improved by `exchanged`."""
    found = space.grid(points)
    thinned = isinstance(space, Sequence) and len(found) < (space.count or 0)
    if thinned:
        log.warning(
            "a sequence has %d designs: %d of them are compared, and the best is improved by "
            "exchanging its parts one at a time", space.count, len(found),
        )  # fmt: skip
    return found, thinned


def as_numbers(value: Any, what: str, dtype: torch.dtype | None = None) -> Tensor:
    """A floating-point tensor; the error names a value that is not a finite number. With `dtype`,
    the tensor has at least that precision, and numbers of Python, which have no type, are not
    rounded first."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if dtype == torch.float64 and not isinstance(value, Tensor | np.ndarray | np.generic):
            tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be numbers, not {value!r}") from error
    tensor = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
    tensor = tensor if dtype is None else tensor.to(torch.promote_types(tensor.dtype, dtype))
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{what} must be finite; there is {_first_bad(tensor)}")
    return tensor


def _first_bad(tensor: Tensor) -> str:
    place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    return f"{float(tensor[tuple(place)])} at {place}"


class Space(ABC):
    """A set of designs of one shape. dtype: the type of its numbers, None if it has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def to(self, dtype: torch.dtype) -> Space:
        """The space with numbers of at least this precision, as they were given."""
        return self

    @abstractmethod
    def inside(self, designs: Tensor) -> Tensor:
        """Whether each design of [D, *shape] is in the space: [D]."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """[n, *shape], uniformly."""

    @property
    def count(self) -> int | None:
        """The number of designs; None if it is not finite."""
        return None

    @abstractmethod
    def grid(self, most: int) -> Tensor:
        """Designs [D, *shape] to compare: all of a list, else about `most`, spread evenly."""

    @abstractmethod
    def nearest(self, designs: Tensor) -> Tensor:
        """Designs moved into the space."""

    def check(self, designs: Any) -> Tensor:
        """[D, *shape], each inside, or an error that names the first that is not."""
        found = as_numbers(designs, "designs")
        if found.shape[1:] != self.shape or found.ndim != len(self.shape) + 1:
            raise ShapeError(
                f"designs have shape {list(found.shape)}, not [D, {', '.join(map(str, self.shape))}"
                f"]: one row for each design of shape {list(self.shape)}"
            )
        if not len(found):
            raise DataError("there are no designs to choose from")
        outside = (~self.inside(found.detach())).nonzero().flatten()
        if len(outside):
            row = int(outside[0])
            raise DataError(f"design {row} is {found[row].tolist()}, outside {self}")
        return found


class Choices(Space):
    """A list of designs [C, *shape]."""

    def __init__(self, values: Any, dtype: torch.dtype | None = None) -> None:
        self.given = values
        self.values = as_numbers(values, "choices", dtype)
        self.dtype = self.values.dtype
        if not self.values.ndim or not len(self.values):
            raise DataError("choices must be a list with at least one design")
        self.shape = tuple(self.values.shape[1:])

    def to(self, dtype: torch.dtype) -> Space:
        return self if dtype == self.dtype else Choices(self.given, dtype)

    def __repr__(self) -> str:
        some = ", ".join(str(v) for v in self.values[:6].tolist())
        return f"Choices({some}{', …' if len(self.values) > 6 else ''})"

    @property
    def count(self) -> int | None:
        return len(self.values)

    def _distance(self, designs: Tensor) -> Tensor:
        flat = designs.reshape(len(designs), 1, -1) - self._like(designs).reshape(
            1, len(self.values), -1
        )
        return flat.abs().sum(-1)  # [D, C]

    def _like(self, designs: Tensor) -> Tensor:
        return self.values.to(designs)

    def inside(self, designs: Tensor) -> Tensor:
        size = 1 + self._like(designs).abs().max()
        few = designs.split(max(1, _BLOCK // self.values.numel()))
        return torch.cat([self._distance(some).amin(1) for some in few]) <= 1e-6 * size

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        index = (uniform((n,), like, generator) * len(self.values)).long()
        return self.values.to(like)[index.clamp_max(len(self.values) - 1)]

    def grid(self, most: int) -> Tensor:
        return self.values

    def nearest(self, designs: Tensor) -> Tensor:
        return self._like(designs)[self._distance(designs).argmin(1)]


class Box(Space):
    """low ≤ d ≤ high in every coordinate; `low` and `high` have the shape of a design."""

    def __init__(self, low: Any, high: Any, dtype: torch.dtype | None = None) -> None:
        self.given = low, high
        ends = as_numbers(low, "low", dtype), as_numbers(high, "high", dtype)
        self.dtype = torch.promote_types(ends[0].dtype, ends[1].dtype)
        ends = as_numbers(low, "low", self.dtype), as_numbers(high, "high", self.dtype)
        self.low, self.high = torch.broadcast_tensors(*ends)
        if bool((self.low >= self.high).any()):
            raise DataError(
                f"low must lie below high, not {self.low.tolist()}, {self.high.tolist()}"
            )
        self.shape = tuple(self.low.shape)

    def to(self, dtype: torch.dtype) -> Space:
        return self if dtype == self.dtype else Box(*self.given, dtype)

    def __repr__(self) -> str:
        return f"Box({self.low.tolist()}, {self.high.tolist()})"

    def inside(self, designs: Tensor) -> Tensor:
        slack = 1e-6 * (self.high - self.low).to(designs)
        ok = (designs >= self.low.to(designs) - slack) & (designs <= self.high.to(designs) + slack)
        return ok.reshape(len(designs), -1).all(1)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        u = uniform((n, *self.shape), like, generator)
        return self.low.to(like) + u * (self.high - self.low).to(like)

    def grid(self, most: int) -> Tensor:
        axes = max(1, math.prod(self.shape))
        each = int(most ** (1 / axes) + 1e-9)
        if each < 2:
            raise MethodError(
                f"a grid over {axes} coordinates needs 2**{axes} designs at least, and {most} are "
                "asked for: raise them, or optimise by 'gradient' or 'bayes'"
            )
        ticks = torch.linspace(0, 1, each, dtype=self.low.dtype)
        u = torch.cartesian_prod(*[ticks] * axes).reshape(-1, *self.shape)
        return self.low + u * (self.high - self.low)

    def nearest(self, designs: Tensor) -> Tensor:
        return designs.maximum(self.low.to(designs)).minimum(self.high.to(designs))


class Reals(Space):
    """All real vectors of a shape, without ends; draws are standard normal."""

    def __init__(self, *shape: int) -> None:
        self.shape = tuple(checks.whole("shape", size) for size in shape)

    def __repr__(self) -> str:
        return f"Reals({', '.join(map(str, self.shape))})"

    def inside(self, designs: Tensor) -> Tensor:
        return torch.isfinite(designs).reshape(len(designs), -1).all(1)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        return torch.special.ndtri(uniform((n, *self.shape), like, generator))

    def grid(self, most: int) -> Tensor:
        raise MethodError("all real numbers have no grid: give a Box")

    def nearest(self, designs: Tensor) -> Tensor:
        return designs


class Sequence(Space):
    """Several designs that are chosen together: [k, *shape], each in its own space.

    Parameters
    ----------
    spaces: a list of spaces of one shape, or one space for all.
    length: the number of designs, if one space is given.
    """

    def __init__(self, spaces: Space | Several[Space], length: int | None = None) -> None:
        if isinstance(spaces, Space):
            if length is None:
                raise MethodError("a sequence of one space needs its length")
            spaces = [spaces] * checks.whole("length", length)
        self.spaces = tuple(spaces)
        shapes = {space.shape for space in self.spaces}
        if len(shapes) != 1:
            raise ShapeError(f"the spaces of a sequence must have one shape, not {sorted(shapes)}")
        self.shape = (len(self.spaces), *self.spaces[0].shape)
        for space in self.spaces:
            own = space.dtype or self.dtype
            self.dtype = own if self.dtype is None or own is None else (
                torch.promote_types(own, self.dtype)
            )  # fmt: skip

    def to(self, dtype: torch.dtype) -> Space:
        return Sequence([space.to(dtype) for space in self.spaces])

    def __repr__(self) -> str:
        return f"Sequence({', '.join(map(repr, self.spaces))})"

    @property
    def count(self) -> int | None:
        counts = [space.count for space in self.spaces]
        return None if None in counts else math.prod(n for n in counts if n is not None)

    def inside(self, designs: Tensor) -> Tensor:
        each = [space.inside(designs[:, i]) for i, space in enumerate(self.spaces)]
        return torch.stack(each).all(0)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        return torch.stack([space.draw(n, generator, like) for space in self.spaces], 1)

    def grid(self, most: int) -> Tensor:
        each = int(most ** (1 / len(self.spaces)) + 1e-9)
        parts = [space.grid(each) for space in self.spaces]
        if math.prod(len(part) for part in parts) > max(most, MOST_LISTED):
            spread = lambda n: torch.linspace(0, n - 1, min(n, max(1, each))).long()  # noqa: E731
            parts = [part[spread(len(part))] for part in parts]
        index = torch.cartesian_prod(*[torch.arange(len(part)) for part in parts])
        index = index.reshape(-1, len(parts))
        return torch.stack([part[index[:, i]] for i, part in enumerate(parts)], 1)

    def exchanged(self, design: Tensor, values: Callable[[Tensor], Tensor], most: int) -> Tensor:
        """A design [*shape] whose parts are replaced, one at a time, by the best of the grid of
        their space, until no replacement has a larger value."""
        best = float(values(design.unsqueeze(0))[0])
        for _ in range(_SWEEPS):
            before = best
            for i, space in enumerate(self.spaces):
                part = space.grid(most).to(design)
                others = design.expand(len(part), *design.shape).clone()
                others[:, i] = part
                found = values(others)
                if float(found.max()) > best:
                    best, design = float(found.max()), others[int(found.argmax())]
            if best == before:
                break
        return design

    def nearest(self, designs: Tensor) -> Tensor:
        each = [space.nearest(designs[:, i]) for i, space in enumerate(self.spaces)]
        return torch.stack(each, 1)


Likelihood = Callable[[Tensor, Tensor], D.Distribution]
Simulator = Callable[[Tensor, Tensor, torch.Generator], Tensor]


class Experiment:
    """A prior, a likelihood or a simulator, and a space of designs.

    Parameters
    ----------
    prior : Distribution, callable, Tensor or ParameterDistribution
        A torch distribution; a function (n, generator) -> θ [n, ...]; a tensor of draws; or a
        `ParameterDistribution`.
    likelihood : callable, optional
        (θ, d) -> a torch distribution over y. Leading axes broadcast.
    simulator : callable, optional
        (θ, d, generator) -> y, for a model without a density (implicit). θ and d have the same
        leading axes.
    space : Space or list
        `Choices`, `Box`, a `Sequence` of these, or a list of designs. If the prior or the space is
        float64, the whole experiment is.
    log_prob : callable, optional
        The log density of a prior that is a function.

    Examples
    --------
    >>> import torch
    >>> from torch.distributions import Bernoulli, Normal
    >>> from doxa.decide import eig
    >>> from doxa.decide.design import Experiment
    >>> likelihood = lambda span, length: Bernoulli(logits=span - length)
    >>> span = Experiment(Normal(7.0, 2.0), likelihood, space=range(1, 16))
    >>> float(eig(span, [7.0], "exact").values).__round__(4)
    0.2311
    """

    def __init__(
        self,
        prior: Any,
        likelihood: Likelihood | None = None,
        *,
        simulator: Simulator | None = None,
        space: Any = None,
        log_prob: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if (likelihood is None) == (simulator is None):
            raise MethodError("give a likelihood, or a simulator where there is none: one of them")
        self.prior: ParameterDistribution = as_distribution(prior, log_prob)
        self.likelihood, self.simulator = likelihood, simulator
        if space is None:
            raise MethodError("space is missing: Choices([...]), Box(low, high) or a Sequence")
        space = space if isinstance(space, Space) else Choices(list(space))
        known = [dtype for dtype in (space.dtype, self.prior.dtype) if dtype is not None]
        self.dtype = functools.reduce(torch.promote_types, known, torch.float32)
        self.space = space.to(self.dtype)  # all numbers of an experiment are of one type

    @property
    def implicit(self) -> bool:
        return self.likelihood is None

    def given(self, posterior: Any) -> Experiment:
        """The same experiment with another prior, for example the posterior after outcomes."""
        return Experiment(posterior, self.likelihood, simulator=self.simulator, space=self.space)

    def designs(self, designs: Any = None, like: Tensor | None = None) -> Tensor:
        """Designs [D, *shape], checked; by default all of a list of choices."""
        if designs is None:
            if not isinstance(self.space, Choices):
                raise MethodError(f"designs are missing: {self.space} is no list of choices")
            designs = self.space.values
        found = self.space.check(as_numbers(designs, "designs", self.dtype))
        return found if like is None else found.to(like)

    def outcome(self, theta: Tensor, designs: Tensor) -> D.Distribution:
        """p(y | θ, d), with the leading axes of both broadcast."""
        if self.likelihood is None:
            raise MethodError(
                "this experiment has a simulator and no likelihood: estimate by 'infonce', or by "
                "'ba', which needs none"
            )
        try:
            found = self.likelihood(theta, designs)
        except ValueError as error:  # torch's, where parameters are out of range
            reason = str(error).split(" of distribution")[0].split("\n")[0]
            raise NumericalError(
                f"the parameters of the likelihood are not valid at some θ and design: {reason}"
            ) from error
        if not isinstance(found, D.Distribution):
            raise MethodError(
                f"the likelihood must return a torch distribution, not {type(found).__name__}"
            )
        return unchecked(found)

    def simulate(self, theta: Tensor, designs: Tensor, generator: torch.Generator) -> Tensor:
        """y [N, D, *event] for θ [N, ...] under designs [D, ...], finite."""
        lead = (len(theta), len(designs))
        outer = theta.unsqueeze(1)
        if self.simulator is not None:
            y = self.simulator(
                outer.expand(lead + theta.shape[1:]), designs.expand(lead + designs.shape[1:]),
                generator,
            )  # fmt: skip
            if not isinstance(y, Tensor) or tuple(y.shape[:2]) != lead:
                shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
                raise ShapeError(
                    f"the simulator was given θ and designs with {list(lead)} in front and gave "
                    f"{shape}; y must be [{lead[0]}, {lead[1]}, ...]"
                )
            y = y if y.is_floating_point() else y.to(theta)
        else:
            found = self.outcome(outer, designs)
            check_front(found, lead)
            event = (
                found.event_shape
            )  # the same uniform for all designs, so that their differences are precise
            drawn = from_uniform(found, uniform((lead[0], 1, *event), designs, generator))
            y = draw(found, (), generator, designs) if drawn is None else drawn
        check_finite(y, theta, designs)
        return y

    def log_prob(self, y: Tensor, theta: Tensor, designs: Tensor) -> Tensor:
        """log p(y | θ, d), with all leading axes broadcast."""
        found = self.outcome(theta, designs)
        if isinstance(found, D.MultivariateNormal):  # torch's own does not broadcast its factor
            event = len(found.event_shape)
            found = found.expand(
                torch.broadcast_shapes(found.batch_shape, y.shape[: y.ndim - event])
            )
        return found.log_prob(y)

    def outcomes(self, theta: Tensor, designs: Tensor) -> Tensor | None:
        """All outcomes [Y, *event] if y is discrete and they are few; else None."""
        if self.likelihood is None:
            return None
        return outcomes_of(self.outcome(theta[:1].unsqueeze(1), designs))

    def table(self, outcomes: Tensor, theta: Tensor, designs: Tensor) -> Tensor:
        """log p(y | θ, d) of every outcome: [Y, S, D]."""
        found = self.outcome(theta.unsqueeze(1), designs)
        lead = (len(theta), len(designs))
        check_front(found, lead)
        if isinstance(found, D.Bernoulli):  # log p(0) = log p(1) − logit: one pass in place of two
            yes = F.logsigmoid(found.logits)
            log_p = torch.stack([yes - found.logits, yes])
            if bool(torch.isnan(log_p[0].detach().sum())):  # −∞ + ∞: a logit of −∞
                log_p = torch.stack([F.logsigmoid(-found.logits), yes])
        else:
            y = outcomes.reshape(len(outcomes), 1, 1, *outcomes.shape[1:])
            log_p = found.log_prob(y).expand(len(outcomes), *lead)
        if bool(torch.isnan(log_p[0].detach().sum())):  # of one outcome: a quick look
            place = torch.isnan(log_p[0]).nonzero()[0].tolist()
            raise NumericalError(
                f"the likelihood is not a number at θ = {theta[place[0]].tolist()}, design "
                f"{designs[place[1]].tolist()}"
            )
        return log_p


def check_front(found: D.Distribution, lead: tuple[int, int]) -> None:
    """Check that a likelihood was written for arrays that broadcast."""
    batch = tuple(found.batch_shape)
    if batch != lead:
        raise ShapeError(
            f"the likelihood's distribution has batch shape {list(batch)} where θ and designs have "
            f"{list(lead)} in front: write it for arrays that broadcast, and make the axes of one "
            "outcome an event (torch.distributions.Independent)"
        )


def check_finite(y: Tensor, theta: Tensor, designs: Tensor) -> None:
    good = torch.isfinite(y)
    if bool(good.all()):
        return
    place = (~good).nonzero()[0].tolist()
    raise DataError(
        f"an outcome is {float(y[tuple(place)])} at θ = {theta[place[0]].tolist()}, design "
        f"{designs[place[1]].tolist()}: the simulator must give finite numbers"
    )


def working_memory(
    mean: float = 7.0, std: float = 2.0, longest: int = 15, dtype: torch.dtype = torch.float64
) -> Experiment:
    """How many digits can a person repeat? θ ~ N(mean, std²), and a list of l digits is repeated
    without a mistake with probability sigmoid(θ − l)."""
    checks.positive("std", std)
    if not math.isfinite(mean):
        raise MethodError(f"mean must be a finite number, not {mean!r}")
    prior = Normal(torch.tensor(mean, dtype=dtype), torch.tensor(std, dtype=dtype))

    def likelihood(theta: Tensor, length: Tensor) -> Bernoulli:
        return Bernoulli(logits=theta - length, validate_args=False)

    return Experiment(prior, likelihood, space=Choices(torch.arange(1, longest + 1, dtype=dtype)))


def location_finding(
    sources: int = 2,
    dimensions: int = 2,
    noise: float = 0.5,
    background: float = 0.1,
    closest: float = 1e-4,
    device: torch.device | str = "cpu",
) -> Experiment:
    """Where are K hidden sources? θ_k ~ N(0, I), and at d one measures

        y ~ N(log(b + Σ_k 1/(m + ‖θ_k − d‖²)), σ²)

    Sheng & Hu (2005), as in Foster et al. (2021): K = 2 sources in the plane, σ = 0.5, b = 0.1,
    m = 1e-4."""
    zeros = torch.zeros(sources, dimensions, device=device)
    spread = torch.tensor(noise, device=device)  # once: captured steps copy nothing
    prior = Independent(Normal(zeros, torch.ones_like(zeros), validate_args=False), 2)

    def likelihood(theta: Tensor, design: Tensor) -> Normal:
        squared = (theta - design.unsqueeze(-2)).square().sum(-1)  # [..., K]
        strength = background + (closest + squared).reciprocal().sum(-1)
        return Normal(strength.log(), spread.to(strength), validate_args=False)

    return Experiment(prior, likelihood, space=Reals(dimensions))
