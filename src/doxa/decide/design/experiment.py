"""An experiment: what is believed, what a design would show, and which designs there are.

    θ ~ p(θ),   y ~ p(y | θ, d),   d in a space

The likelihood is written for arrays that broadcast: θ is [..., *shape of θ] and d is
[..., *shape of d], with any axes in front, and the distribution that comes back has those axes in
front. One call then evaluates all draws under all designs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributions as D

from doxa.decide.design.beliefs import Belief, as_belief
from doxa.decide.design.draws import draw, from_uniform, outcomes_of, unchecked, uniform
from doxa.decide.design.space import Choices, Space, as_numbers
from doxa.errors import DataError, MethodError, NumericalError, ShapeError

Likelihood = Callable[[Tensor, Tensor], D.Distribution]
Simulator = Callable[[Tensor, Tensor, torch.Generator], Tensor]


class Experiment:
    """A prior, a likelihood or a simulator, and a space of designs.

    Parameters
    ----------
    prior: a torch distribution; a function (n, generator) -> θ [n, ...]; a tensor of draws; or a
        belief.
    likelihood: (θ, d) -> a torch distribution over y. Its axes in front broadcast.
    simulator: (θ, d, generator) -> y, for a model without a density (implicit). θ and d come with
        the same axes in front.
    space: `Choices`, `Box`, a `Sequence` of these, or a list of designs. Where the prior's numbers
        or the space's are float64, all of the experiment's are.
    log_prob: the log density of a prior that is a function.

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
        self.prior: Belief = as_belief(prior, log_prob)
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

    def given(self, belief: Any) -> Experiment:
        """The same experiment under another belief: after some outcomes, say."""
        return Experiment(belief, self.likelihood, simulator=self.simulator, space=self.space)

    def designs(self, designs: Any = None, like: Tensor | None = None) -> Tensor:
        """[D, *shape], checked; all of a list of choices where none are given."""
        if designs is None:
            if not isinstance(self.space, Choices):
                raise MethodError(f"designs are missing: {self.space} is no list of choices")
            designs = self.space.values
        found = self.space.check(as_numbers(designs, "designs", self.dtype))
        return found if like is None else found.to(like)

    def outcome(self, theta: Tensor, designs: Tensor) -> D.Distribution:
        """p(y | θ, d), with the axes in front of both broadcast."""
        if self.likelihood is None:
            raise MethodError(
                "this experiment has a simulator and no likelihood: estimate by 'infonce', or by "
                "'ba', which never asks for one"
            )
        try:
            found = self.likelihood(theta, designs)
        except ValueError as error:  # torch's, where parameters are out of range
            reason = str(error).split(" of distribution")[0].split("\n")[0]
            raise NumericalError(
                f"the likelihood refuses its own parameters at some θ and design: {reason}"
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
            )  # one uniform for all designs: they are compared on equal luck
            drawn = from_uniform(found, uniform((lead[0], 1, *event), designs, generator))
            y = draw(found, (), generator, designs) if drawn is None else drawn
        check_finite(y, theta, designs)
        return y

    def log_prob(self, y: Tensor, theta: Tensor, designs: Tensor) -> Tensor:
        """log p(y | θ, d), all axes in front broadcast."""
        found = self.outcome(theta, designs)
        if isinstance(found, D.MultivariateNormal):  # torch's own does not broadcast its factor
            event = len(found.event_shape)
            found = found.expand(
                torch.broadcast_shapes(found.batch_shape, y.shape[: y.ndim - event])
            )
        return found.log_prob(y)

    def outcomes(self, theta: Tensor, designs: Tensor) -> Tensor | None:
        """All outcomes [Y, *event] where y is discrete and they are few."""
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
    """That a likelihood was written for arrays that broadcast."""
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
