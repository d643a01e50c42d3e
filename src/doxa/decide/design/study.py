"""Sequential experiments: `Study` for one subject, `rehearse` for many simulated subjects, and
`labelling`, the experiment of labelling rows for a network.

A study chooses each design given the outcomes so far:

    d_t = argmax_d EIG(d | h_{t−1}),   p(θ | h_t) ∝ p(θ | h_{t−1}) p(y_t | θ, d_t)

The posterior of θ is stored as atoms with weights. For a θ of one number the atoms are the nodes of
a quadrature. They are placed again after every outcome, from the whole history, and come with an
estimate of their error. For a discrete θ the atoms are all of its values. Otherwise they are draws
of the prior; when their effective number is too small, NUTS draws new ones given the whole history.

`rehearse` runs a study on simulated subjects with adaptive, fixed or random designs. The posteriors
of all subjects are weights [P, S] on common atoms, so a step is a few matrix products. If the
nodes of a quadrature are too few for the posterior of some subject, the rehearsal is repeated with
more nodes and the same random numbers.

In `labelling`, θ is the function and a design is one row or several rows:

    EIG(rows) = I(y_rows; f) = H[y_rows] − E_f H[y_rows | f]

For one row this is BALD (Houlsby et al., 2011). For several rows it is their joint information,
which counts shared information only once (BatchBALD, Kirsch et al., 2019). θ is one of the S
functions of a predictive, so every estimator applies: "exact" sums over functions and labels; the
others are for numeric labels, and for batches with too many outcomes.
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
from doxa.decide.design.distributions import Quadrature, Weighted
from doxa.decide.design.draws import EIG, source, uniform
from doxa.decide.design.eig import eig
from doxa.decide.design.experiment import Choices, Experiment, Sequence, as_numbers, compared
from doxa.density import sample
from doxa.errors import (
    DataError,
    MethodError,
    ShapeError,
    Unavailable,
    deprecated,
    did_you_mean,
)
from doxa.method import Method
from doxa.predictive import Predictive
from doxa.registry import get_method

INFERENCES = ("auto", "grid", "importance", "sample")
_BLOCK = 1 << 20  # log likelihoods held at a time


class Study:
    """Adaptive experiments on one subject.

    Parameters
    ----------
    experiment : Experiment
        The prior of θ, the likelihood of outcomes, and the space of designs.
    inference : {"auto", "grid", "importance", "sample"}, default "auto"
        "grid": a discrete θ, or a θ of one number by a quadrature, with `posterior.mean_error` and
        `posterior.std_error`. "importance": draws of the prior, replaced by a sampler when their
        effective number is small. "sample": a sampler after every outcome. "auto": a grid if
        possible, else importance.
    sampler : str or Method, optional
        The method that draws from p(θ | h), as for `doxa.sample`. The default is NUTS with four
        chains that give `draws` draws in total.
    draws : int, default 2000
        Number of atoms.
    points : int, default 64
        Number of designs to compare if the space is not a list. All designs of a list are
        compared. A sequence of lists with more than 20,000 designs is subsampled, and the best
        design is improved by exchanging its parts.
    estimator : str, optional
        How a gain is estimated, as in `eig`. The default is "exact" for discrete outcomes, else
        "pce".
    seed : int, default 0
        Seed of all draws.
    **counts : int
        Numbers of draws of the estimator, as in `eig`.

    Attributes
    ----------
    posterior : Weighted
        The posterior of θ given the outcomes so far.
    history : list of (design, outcome)
        The experiments so far.

    Examples
    --------
    >>> from doxa.decide.design import Study, working_memory
    >>> study = Study(working_memory())
    >>> for length, outcome in zip((5, 7, 9), (1, 1, 0)):
    ...     study.tell(length, outcome)
    >>> round(float(study.posterior.mean), 3), round(float(study.posterior.std), 3)
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
            raise MethodError("a study needs the likelihood of outcomes; this experiment has none")
        self.experiment, self.seed = experiment, seed
        self.draws = checks.whole("draws", draws, least=2)
        each = math.ceil(draws / 4)
        self.sampler = get_method("nuts")(each, 200) if sampler is None else sampler
        self.points = checks.whole("points", points)
        self.candidates, self.thinned = compared(experiment.space, points)
        self.inference, self.prior = self._first(inference)
        self.posterior = self.prior
        self.estimator, self.counts = estimator, counts
        self.history: list[tuple[Tensor, Tensor]] = []
        self.renewed = 0

    @property
    def belief(self) -> Weighted:
        """Deprecated alias of `posterior`."""
        deprecated("Study.belief", "Study.posterior")
        return self.posterior

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
        """The expected information gain of each design now; by default of all `candidates`."""
        now = self.experiment.given(self.posterior)
        estimator = self.estimator
        if estimator is None:
            discrete = now.outcomes(self.posterior.theta, self.candidates) is not None
            estimator = "exact" if discrete else "pce"
        seed = self.seed + len(self.history)
        at = self.candidates if designs is None else designs
        return eig(now, at, estimator, seed=seed, **self.counts)

    def next(self) -> Tensor:
        """The design with the largest expected information gain."""
        best, space = self.gains().best_design, self.experiment.space
        if self.thinned and isinstance(space, Sequence):
            return space.exchanged(best, lambda few: self.gains(few).values, self.points)
        return best

    def tell(self, design: Any, outcome: Any) -> None:
        """Update the posterior of θ with an outcome.

        Parameters
        ----------
        design : array_like
            The design of the experiment.
        outcome : array_like
            The observed outcome.
        """
        given = as_numbers(design, "the design", self.candidates.dtype).detach()
        at = self.experiment.space.check(given.unsqueeze(0).to(self.candidates))[0]
        y = self._outcome(outcome, at)
        history = [*self.history, (at, y)]
        posterior, renewed = self._after(history), self.renewed
        few = self.inference == "importance" and posterior.effective < self.draws / 10
        if few or self.inference == "sample":
            posterior, renewed = self._renewed(history, posterior), renewed + 1
        self.history, self.posterior, self.renewed = history, posterior, renewed

    def _after(self, history: list[tuple[Tensor, Tensor]]) -> Weighted:
        """The posterior after the last outcome of a history, without a sampler."""
        if isinstance(self.prior, Quadrature):
            return self.prior.given(lambda theta: self._log_likelihood(history, theta))
        if self.inference == "sample":
            return self.posterior
        at, y = history[-1]
        return self.posterior.updated(self.experiment.log_prob(y, self.posterior.theta, at))

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
        found = self.experiment.outcome(self.posterior.theta[:1], design)
        if y.shape != found.event_shape:
            raise ShapeError(
                f"the outcome has shape {list(y.shape)}; outcomes of this experiment have shape "
                f"{list(found.event_shape)}"
            )
        known = self.experiment.outcomes(self.posterior.theta, design.unsqueeze(0))
        if known is not None and not bool((known == y).flatten(1).all(1).any() if y.ndim
                                          else (known == y).any()):  # fmt: skip
            listed = ", ".join(str(v) for v in known[:12].tolist())
            raise DataError(f"the outcome {y.tolist()} is not possible; it must be one of {listed}")
        return y

    def _renewed(self, history: list[tuple[Tensor, Tensor]], posterior: Weighted) -> Weighted:
        """Draws from p(θ | h) by a sampler, from the prior and every outcome of a history."""
        designs = torch.stack([design for design, _ in history])  # [T, ...]
        outcomes = torch.stack([y for _, y in history])
        shape = posterior.theta.shape[1:]

        def log_density(params: dict[str, Tensor]) -> Tensor:
            theta = params["theta"]
            each = self.experiment.log_prob(outcomes, theta.expand(len(outcomes), *shape), designs)
            return self.experiment.prior.log_prob(theta) + each.sum()

        found = sample(
            log_density, {"theta": posterior.mean.double()}, self.sampler, members=4,
            seed=self.seed + self.renewed + 1, dtype=torch.float64, progress=False,
        )  # fmt: skip
        theta = found["theta"].flatten(0, 1)  # [4·draws, ...]
        keep = torch.linspace(0, len(theta) - 1, min(self.draws, len(theta))).long()
        return Weighted(theta[keep].to(posterior.theta))


WAYS = ("adaptive", "random")


@dataclass(frozen=True)
class Rehearsal:
    """The result of `rehearse` on P subjects with T experiments each.

    Attributes
    ----------
    truth : Tensor [P, ...]
        θ of each subject.
    designs : Tensor [T, P]
        Row numbers of the candidates.
    outcomes : Tensor [T, P]
        Row numbers of the possible outcomes.
    mean, std : Tensor [T + 1, P, ...]
        Moments of the posterior after 0..T experiments.
    entropy : Tensor [T + 1, P]
        Entropy of the posterior: of its density if θ is a number on a quadrature, else of the
        weights of the atoms.
    """

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
    experiment : Experiment
        An experiment with discrete outcomes.
    truth : Tensor [P, ...]
        θ of each subject.
    steps : int
        Number of experiments per subject.
    way : str or array_like, default "adaptive"
        "adaptive", "random", or fixed designs [steps, ...] for all subjects.
    seed : int, default 0
        Seed of the simulated outcomes and random designs.

    Returns
    -------
    Rehearsal
        Designs, outcomes and posteriors of all subjects.
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
    log_cell = torch.zeros_like(atoms.log_weight)  # log w/p(θ), the width of the cell of a node
    if isinstance(atoms, Quadrature):
        log_cell = atoms.log_weight - atoms.log_prob(atoms.theta)
    moments, kept = [_moments(log_w, theta, log_cell)], list[tuple[Tensor, Tensor]]()
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
        moments.append(_moments(log_w, theta, log_cell))
    mean, std, entropy = (torch.stack(part) for part in zip(*moments, strict=True))
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
    """The row numbers, among the candidates, of fixed designs."""
    fixed = experiment.designs(given, like=designs)
    if len(fixed) != steps:
        raise DataError(f"{len(fixed)} fixed designs were given for {steps} experiments")
    away = (fixed.reshape(steps, 1, -1) - designs.reshape(1, len(designs), -1)).abs().sum(2)
    return away.argmin(1)


def labelling(p: Predictive, batch: int | None = None) -> Experiment:
    """The experiment of labelling rows of a predictive.

    Parameters
    ----------
    p : Predictive
        A prediction at N rows that keeps samples of functions.
    batch : int, optional
        Number of rows that are labelled together. A design is then [batch] rows, else one row.

    Returns
    -------
    Experiment
        `eig(labelling(p), None, "exact")` is BALD of every row.

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
    """p(y | f_s, row) as a function of s and row, and the number of rows."""
    samples = p.samples  # raises Unavailable if functions are not kept
    likelihood = p.likelihood
    if likelihood.classifies and samples.ndim == 3:
        log_p = samples.log_softmax(2)
        return lambda s, row: D.Categorical(logits=log_p[s, row], validate_args=False), (
            log_p.shape[1]
        )
    if samples[0, 0].numel() != 1:
        raise MethodError(
            f"a label must be one class or one number; the outputs have shape "
            f"{list(samples.shape[2:])}"
        )
    flat = samples.reshape(samples.shape[:2])
    if likelihood.discrete and not likelihood.binary:
        raise MethodError(f"labels of {likelihood.name} are not supported: classes or numbers")
    if likelihood.discrete:
        return lambda s, row: D.Bernoulli(logits=flat[s, row], validate_args=False), flat.shape[1]
    _, mean, std = p.normals()
    mean, std = mean.reshape(flat.shape).to(flat), std.expand_as(mean).reshape(flat.shape).to(flat)
    return lambda s, row: D.Normal(mean[s, row], std[s, row], validate_args=False), flat.shape[1]
