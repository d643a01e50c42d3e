"""A study: experiments one after the other, each chosen by what the earlier ones have told.

    d_t = argmax_d EIG(d | h_{t−1}),   p(θ | h_t) ∝ p(θ | h_{t−1}) p(y_t | θ, d_t)

The belief is kept as atoms with weights. A θ of one number has the nodes of a quadrature, which are
placed anew after every outcome, from the whole history, and state their error. A discrete θ has
all of its values. Else atoms are draws of the prior, which are drawn anew by NUTS from the whole
history when their weights have become too uneven.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.beliefs import Quadrature, Weighted
from doxa.decide.design.draws import source
from doxa.decide.design.eig import eig
from doxa.decide.design.estimate import EIG
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.space import Sequence, as_numbers, compared
from doxa.density import sample
from doxa.errors import DataError, MethodError, ShapeError, Unavailable, did_you_mean
from doxa.method import Method
from doxa.registry import get_method

INFERENCES = ("auto", "grid", "importance", "sample")
_BLOCK = 1 << 20  # log likelihoods held at a time


class Study:
    """Adaptive experiments on one subject.

    Parameters
    ----------
    inference: "grid" (θ of one number, by a quadrature with `belief.mean_error` and
        `belief.std_error`, or discrete), "importance" (draws of the prior,
        renewed by a sampler when few of them count), "sample" (a sampler after every outcome), or
        "auto": a grid where there is one, else importance.
    sampler: the method that draws from p(θ | h), as `doxa.sample` takes it; default: NUTS, four
        chains that give `draws` in all.
    draws: how many atoms. points: designs that are compared, where they are no list. All designs
        of a list are compared; of a sequence of lists with more than 20,000 designs some are, and
        the best is improved by exchanging its parts.
    estimator, counts: how a gain is estimated, as in `eig`; default: exactly where outcomes are
        discrete, else "pce".

    Examples
    --------
    >>> from doxa.decide.design import Study, working_memory
    >>> study = Study(working_memory())
    >>> for length, outcome in zip((5, 7, 9), (1, 1, 0)):
    ...     study.tell(length, outcome)
    >>> round(float(study.belief.mean), 3), round(float(study.belief.std), 3)
    (7.745, 1.229)
    """

    def __init__(
        self,
        experiment: Experiment,
        inference: str = "auto",
        *,
        sampler: str | Method | None = None,
        draws: int = 2000,
        points: int = 64,
        estimator: str | None = None,
        seed: int = 0,
        **counts: Any,
    ) -> None:
        if inference not in INFERENCES:
            raise MethodError(
                f"inference must be one of {', '.join(INFERENCES)}"
                f"{did_you_mean(str(inference), INFERENCES)}"
            )
        if experiment.implicit:
            raise MethodError("a study updates by the likelihood, and this experiment has none")
        self.experiment, self.seed = experiment, seed
        self.draws = checks.whole("draws", draws, least=2)
        each = math.ceil(draws / 4)
        self.sampler = get_method("nuts")(each, 200) if sampler is None else sampler
        self.points = checks.whole("points", points)
        self.candidates, self.thinned = compared(experiment.space, points)
        self.inference, self.prior = self._first(inference)
        self.belief = self.prior
        self.estimator, self.counts = estimator, counts
        self.history: list[tuple[Tensor, Tensor]] = []
        self.renewed = 0

    def _first(self, inference: str) -> tuple[str, Weighted]:
        prior, like = self.experiment.prior, self.candidates
        if inference in ("auto", "grid"):
            try:
                return "grid", prior.atoms(like)
            except Unavailable:
                if inference == "grid":
                    raise
        drawn = prior.draw(self.draws, source(like.device, "study", self.seed), like)
        return ("importance" if inference == "auto" else inference), Weighted(drawn)

    def gains(self, designs: Tensor | None = None) -> EIG:
        """What each design would tell now; default: all of `candidates`."""
        now = self.experiment.given(self.belief)
        estimator = self.estimator
        if estimator is None:
            discrete = now.outcomes(self.belief.theta, self.candidates) is not None
            estimator = "exact" if discrete else "pce"
        seed = self.seed + len(self.history)
        at = self.candidates if designs is None else designs
        return eig(now, at, estimator, seed=seed, **self.counts)

    def next(self) -> Tensor:
        """The design that would tell most."""
        best, space = self.gains().best_design, self.experiment.space
        if self.thinned and isinstance(space, Sequence):
            return space.exchanged(best, lambda few: self.gains(few).values, self.points)
        return best

    def tell(self, design: Any, outcome: Any) -> None:
        """An outcome, by which the belief is updated."""
        given = as_numbers(design, "the design", self.candidates.dtype).detach()
        at = self.experiment.space.check(given.unsqueeze(0).to(self.candidates))[0]
        y = self._outcome(outcome, at)
        history = [*self.history, (at, y)]
        belief, renewed = self._after(history), self.renewed
        few = self.inference == "importance" and belief.effective < self.draws / 10
        if few or self.inference == "sample":
            belief, renewed = self._renewed(history, belief), renewed + 1
        self.history, self.belief, self.renewed = history, belief, renewed

    def _after(self, history: list[tuple[Tensor, Tensor]]) -> Weighted:
        """The belief after the last outcome of a history, without a sampler."""
        if isinstance(self.prior, Quadrature):
            return self.prior.given(lambda theta: self._log_likelihood(history, theta))
        if self.inference == "sample":
            return self.belief
        at, y = history[-1]
        return self.belief.updated(self.experiment.log_prob(y, self.belief.theta, at))

    def _log_likelihood(self, history: list[tuple[Tensor, Tensor]], theta: Tensor) -> Tensor:
        """log p(h | θ) of θ [S], [S]."""
        lead = lambda v: v.unsqueeze(1)  # beside θ: [T, 1, ...]  # noqa: E731
        designs, outcomes = (lead(torch.stack(part)) for part in zip(*history, strict=True))
        block = max(1, _BLOCK // len(theta))
        total = theta.new_zeros(len(theta), dtype=torch.float64)
        for d, y in zip(designs.split(block), outcomes.split(block), strict=True):
            each = self.experiment.log_prob(y, theta.unsqueeze(0), d)  # [t, S]
            total = total + each.double().sum(0)
        return total

    def _outcome(self, outcome: Any, design: Tensor) -> Tensor:
        y = as_numbers(outcome, "the outcome", self.candidates.dtype).detach()
        y = y.to(self.candidates)
        found = self.experiment.outcome(self.belief.theta[:1], design)
        if y.shape != found.event_shape:
            raise ShapeError(
                f"the outcome has shape {list(y.shape)}, and one of this experiment has "
                f"{list(found.event_shape)}"
            )
        known = self.experiment.outcomes(self.belief.theta, design.unsqueeze(0))
        if known is not None and not bool((known == y).flatten(1).all(1).any() if y.ndim
                                          else (known == y).any()):  # fmt: skip
            listed = ", ".join(str(v) for v in known[:12].tolist())
            raise DataError(f"the outcome {y.tolist()} cannot be; it is one of {listed}")
        return y

    def _renewed(self, history: list[tuple[Tensor, Tensor]], belief: Weighted) -> Weighted:
        """Draws from p(θ | h) by a sampler, from the prior and every outcome of a history."""
        designs = torch.stack([design for design, _ in history])  # [T, ...]
        outcomes = torch.stack([y for _, y in history])
        shape = belief.theta.shape[1:]

        def log_density(params: dict[str, Tensor]) -> Tensor:
            theta = params["theta"]
            each = self.experiment.log_prob(outcomes, theta.expand(len(outcomes), *shape), designs)
            return self.experiment.prior.log_prob(theta) + each.sum()

        found = sample(
            log_density, {"theta": belief.mean.double()}, self.sampler, members=4,
            seed=self.seed + self.renewed + 1, dtype=torch.float64, progress=False,
        )  # fmt: skip
        theta = found["theta"].flatten(0, 1)  # [4·draws, ...]
        keep = torch.linspace(0, len(theta) - 1, min(self.draws, len(theta))).long()
        return Weighted(theta[keep].to(belief.theta))
