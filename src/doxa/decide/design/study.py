"""A study: experiments one after the other, each chosen by what the earlier ones have told.

    d_t = argmax_d EIG(d | h_{t−1}),   p(θ | h_t) ∝ p(θ | h_{t−1}) p(y_t | θ, d_t)

The belief is kept as atoms with weights: a quadrature's (exact), or draws of the prior, which are
drawn anew by NUTS from the whole history when their weights have become too uneven.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.beliefs import Weighted
from doxa.decide.design.draws import source
from doxa.decide.design.eig import eig
from doxa.decide.design.estimate import EIG
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.space import as_numbers
from doxa.density import sample
from doxa.errors import DataError, MethodError, ShapeError, Unavailable, did_you_mean
from doxa.method import Method
from doxa.registry import get_method

INFERENCES = ("auto", "grid", "importance", "sample")


class Study:
    """Adaptive experiments on one subject.

    Parameters
    ----------
    inference: "grid" (quadrature, θ of one number or discrete), "importance" (draws of the prior,
        renewed by a sampler when few of them count), "sample" (a sampler after every outcome), or
        "auto": a grid where there is one, else importance.
    sampler: the method that draws from p(θ | h), as `doxa.sample` takes it; default: NUTS, four
        chains that give `draws` in all.
    draws: how many atoms. points: designs that are compared, where they are no list.
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
        self.candidates = experiment.space.grid(checks.whole("points", points))
        self.inference, self.belief = self._first(inference)
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

    def gains(self) -> EIG:
        """What each design would tell now."""
        now = self.experiment.given(self.belief)
        estimator = self.estimator
        if estimator is None:
            discrete = now.outcomes(self.belief.theta, self.candidates) is not None
            estimator = "exact" if discrete else "pce"
        seed = self.seed + len(self.history)
        return eig(now, self.candidates, estimator, seed=seed, **self.counts)

    def next(self) -> Tensor:
        """The design that would tell most."""
        return self.gains().best_design

    def tell(self, design: Any, outcome: Any) -> None:
        """An outcome, by which the belief is updated."""
        space = self.experiment.space
        at = space.check(as_numbers(design, "the design").unsqueeze(0).to(self.candidates))[0]
        y = self._outcome(outcome, at)
        self.history.append((at, y))
        try:
            if self.inference == "sample":
                self._renew()
                return
            belief = self.belief.updated(self.experiment.log_prob(y, self.belief.theta, at))
        except DataError:
            self.history.pop()
            raise
        self.belief = belief
        if self.inference == "importance" and belief.effective < self.draws / 10:
            self._renew()

    def _outcome(self, outcome: Any, design: Tensor) -> Tensor:
        y = as_numbers(outcome, "the outcome").to(self.candidates)
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

    def _renew(self) -> None:
        """Draws from p(θ | h) by a sampler, from the prior and every outcome so far."""
        designs = torch.stack([design for design, _ in self.history])  # [T, ...]
        outcomes = torch.stack([y for _, y in self.history])
        shape = self.belief.theta.shape[1:]

        def log_density(params: dict[str, Tensor]) -> Tensor:
            theta = params["theta"]
            each = self.experiment.log_prob(outcomes, theta.expand(len(outcomes), *shape), designs)
            return self.experiment.prior.log_prob(theta) + each.sum()

        self.renewed += 1
        found = sample(
            log_density, {"theta": self.belief.mean.double()}, self.sampler, members=4,
            seed=self.seed + self.renewed, dtype=torch.float64, progress=False,
        )  # fmt: skip
        theta = found["theta"].flatten(0, 1)  # [4·draws, ...]
        keep = torch.linspace(0, len(theta) - 1, min(self.draws, len(theta))).long()
        self.belief = Weighted(theta[keep].to(self.belief.theta))
