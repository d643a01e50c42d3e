"""A study: experiments one after the other, each chosen by what the earlier ones have told.

    d_t = argmax_d EIG(d | h_{t−1}),   p(θ | h_t) ∝ p(θ | h_{t−1}) p(y_t | θ, d_t)

The belief is kept as atoms with weights. A θ of one number has the nodes of a quadrature, which are
placed anew after every outcome, from the whole history, and state their error. A discrete θ has
all of its values. Else atoms are draws of the prior, which are drawn anew by NUTS from the whole
history when their weights have become too uneven.

A study rehearsed on many simulated subjects at once: adaptive, fixed or random designs.

Beliefs of all subjects are weights [P, S] on common atoms, and a step is a few matrix products.
Where the atoms are a quadrature's nodes and too few for the posterior of some subject, it is
rehearsed again, with the same random numbers and more nodes there.

Which rows to label for a network, as an experiment: θ is the function, a design is rows.

    EIG(rows) = I(y_rows; f) = H[y_rows] − E_f H[y_rows | f]

Of one row this is BALD (Houlsby et al., 2011); of several it is their joint, which counts what
they would tell twice only once (BatchBALD, Kirsch et al., 2019). θ is one of the S functions that
a posterior's predictive holds, so every estimator here applies: "exact" sums over functions and
labels, and the others where labels are numbers or a batch has too many outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D

from doxa import checks
from doxa.decide.design.beliefs import Quadrature, Weighted
from doxa.decide.design.draws import EIG, source, uniform
from doxa.decide.design.eig import eig
from doxa.decide.design.experiment import Choices, Experiment, Sequence, as_numbers, compared
from doxa.density import sample
from doxa.errors import DataError, MethodError, ShapeError, Unavailable, did_you_mean
from doxa.method import Method
from doxa.predictive import Predictive
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


WAYS = ("adaptive", "random")


@dataclass(frozen=True)
class Rehearsal:
    """designs [T, P] (rows of the candidates), outcomes [T, P] (rows of the possible ones), and
    after each of 0..T experiments the posterior: mean and std [T + 1, P, ...], entropy [T + 1, P]
    of its density where θ is a number on a quadrature, of the atoms' weights elsewhere."""

    truth: Tensor
    designs: Tensor
    outcomes: Tensor
    mean: Tensor
    std: Tensor
    entropy: Tensor

    @property
    def error(self) -> Tensor:
        """Root mean square distance of the posterior mean from the truth, [T + 1]."""
        return (self.mean - self.truth).square().flatten(1).mean(1).sqrt()

    @property
    def gain(self) -> Tensor:
        """Information about θ so far, averaged over subjects, in nats [T + 1]."""
        return (self.entropy[:1] - self.entropy).mean(1)


def rehearse(
    experiment: Experiment, truth: Tensor, steps: int, way: Any = "adaptive", *, seed: int = 0
) -> Rehearsal:
    """Run a study on subjects with known θ.

    Parameters
    ----------
    truth: θ of each subject [P, ...]. steps: experiments with each.
    way: "adaptive", "random", or fixed designs [steps, ...] for everyone.
    """
    checks.whole("steps", steps)
    designs = experiment.designs()
    truth = truth.to(designs)
    atoms: Weighted = experiment.prior.atoms(designs)
    table = experiment.outcomes(atoms.theta, designs)
    if table is None:
        raise MethodError("a rehearsal needs discrete outcomes; run a Study for each subject")
    chosen = None if isinstance(way, str) else _rows(experiment, way, designs, steps)
    if chosen is None and way not in WAYS:
        raise MethodError(f"way must be one of {', '.join(WAYS)} or a list of designs, not {way!r}")
    true_p = experiment.table(table, truth, designs).exp()  # [Y, P, D]
    while True:
        generator = source(designs.device, "rehearsal", seed)
        log_p = experiment.table(table, atoms.theta, designs)  # [Y, S, D]
        found, last = _run(atoms, log_p, true_p, truth, steps, way if chosen is None else chosen,
                           generator)  # fmt: skip
        finer = atoms.finer(last) if isinstance(atoms, Quadrature) else None
        if finer is None:
            return found
        atoms = finer


def _run(
    atoms: Weighted, log_p: Tensor, true_p: Tensor, truth: Tensor, steps: int, way: str | Tensor,
    generator: torch.Generator,
) -> tuple[Rehearsal, Tensor]:  # fmt: skip
    """A rehearsal on atoms, and the log weights [P, S] at its end."""
    p = log_p.exp()
    known = -torch.special.entr(p).sum(0)  # −H(y | θ_s, d) [S, D]
    people = torch.arange(len(truth), device=truth.device)
    theta = atoms.theta.reshape(len(atoms.theta), -1)
    log_w = atoms.log_weight.expand(len(truth), -1)
    log_cell = torch.zeros_like(atoms.log_weight)  # log w/p(θ), the width that a node stands for
    if isinstance(atoms, Quadrature):
        log_cell = atoms.log_weight - atoms.log_prob(atoms.theta)
    beliefs, kept = [_moments(log_w, theta, log_cell)], list[tuple[Tensor, Tensor]]()
    for t in range(steps):
        if isinstance(way, Tensor):
            row = way[t].expand(len(truth))
        elif way == "random":
            row = (uniform((len(truth),), truth, generator) * p.shape[2]).long()
        else:
            w = log_w.exp()
            marginal = torch.einsum("ps,ysd->ypd", w, p)
            row = (torch.special.entr(marginal).sum(0) + w @ known).argmax(1)
        seen = true_p[:, people, row].cumsum(0)  # [Y, P]
        y = (uniform((len(truth),), truth, generator) > seen[:-1]).sum(0)
        log_w = (log_w + log_p[y, :, row]).log_softmax(1)
        kept.append((row, y))
        beliefs.append(_moments(log_w, theta, log_cell))
    mean, std, entropy = (torch.stack(part) for part in zip(*beliefs, strict=True))
    rows, outcomes = (torch.stack(part) for part in zip(*kept, strict=True))
    shape = (steps + 1, *truth.shape)
    return Rehearsal(truth, rows, outcomes, mean.reshape(shape), std.reshape(shape), entropy), log_w


def _moments(log_w: Tensor, theta: Tensor, log_cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and std [P, ...] and entropy [P] of weights [P, S] on atoms [S, ...]."""
    weight = log_w.exp()
    centre = theta.mean(0)  # differences lose no digits to a mean that is far from zero
    mean = weight @ (theta - centre)
    std = (weight @ (theta - centre).square() - mean.square()).clamp_min(0).sqrt()
    return mean + centre, std, torch.special.entr(weight).sum(1) + weight @ log_cell


def _rows(experiment: Experiment, given: Any, designs: Tensor, steps: int) -> Tensor:
    """Which of the candidates fixed designs are."""
    fixed = experiment.designs(given, like=designs)
    if len(fixed) != steps:
        raise DataError(f"{len(fixed)} fixed designs were given for {steps} experiments")
    away = (fixed.reshape(steps, 1, -1) - designs.reshape(1, len(designs), -1)).abs().sum(2)
    return away.argmin(1)


def labelling(p: Predictive, batch: int | None = None) -> Experiment:
    """The experiment of labelling rows of a predictive.

    Parameters
    ----------
    p: what a posterior (or anyone) predicts at N rows, as samples of functions.
    batch: rows that are labelled together; a design is then [batch] rows, else one row.

    Returns
    -------
    An `Experiment`: `eig(labelling(p), None, "exact")` is BALD of every row.

    Examples
    --------
    >>> import torch, doxa
    >>> from doxa.decide import eig
    >>> from doxa.decide.design import labelling
    >>> p = doxa.Predictive.from_probs(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    >>> float(eig(labelling(p), None, "exact").values).__round__(4)  # one bit
    0.6931
    """
    outcome, rows = _outcomes(p)
    space: Choices | Sequence = Choices(torch.arange(rows, dtype=p.weights.dtype))
    if batch is not None:
        space = Sequence(space, checks.whole("batch", batch))

    def likelihood(function: Tensor, row: Tensor) -> D.Distribution:
        if batch is not None:
            function = function.unsqueeze(-1)
        found = outcome(*torch.broadcast_tensors(function.long(), row.round().long()))
        return found if batch is None else D.Independent(found, 1)

    functions = torch.arange(len(p.weights), dtype=p.weights.dtype)
    return Experiment(Weighted(functions, p.weights.log()), likelihood, space=space)


def _outcomes(p: Predictive) -> tuple[Callable[[Tensor, Tensor], D.Distribution], int]:
    """p(y | f_s, row) as a function of s and row, and how many rows there are."""
    samples = p.samples  # says so where functions are not kept
    likelihood = p.likelihood
    if likelihood.classifies and samples.ndim == 3:
        log_p = samples.log_softmax(2)
        return lambda s, row: D.Categorical(logits=log_p[s, row], validate_args=False), (
            log_p.shape[1]
        )
    if samples[0, 0].numel() != 1:
        raise MethodError(
            f"a label must be one class or one number, and outputs are {list(samples.shape[2:])}"
        )
    flat = samples.reshape(samples.shape[:2])
    if likelihood.discrete and likelihood.name != "bernoulli":
        raise MethodError(f"labels of {likelihood.name} are not supported: classes or numbers")
    if likelihood.discrete:
        return lambda s, row: D.Bernoulli(logits=flat[s, row], validate_args=False), flat.shape[1]
    _, mean, std = p.normals()
    mean, std = mean.reshape(flat.shape).to(flat), std.expand_as(mean).reshape(flat.shape).to(flat)
    return lambda s, row: D.Normal(mean[s, row], std[s, row], validate_args=False), flat.shape[1]
