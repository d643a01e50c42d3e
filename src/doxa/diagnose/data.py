"""The data of the diagnostics, and the significance tests that the checks share.

`DiagnosticData` holds a posterior, its training rows and its test rows; `Head` and `Scored` hold
the predictions and targets of one head. All of it is computed from `Posterior.predict` and the
data; nothing is stored during the fit.

Every test runs at level `ALPHA` (two-sided if both sides are faults), and an alarm also needs an
effect of a stated size. A correct posterior raises a false alarm in any one test with probability
at most ALPHA. `TESTS` tests run per head, so the family-wise error rate is at most TESTS × ALPHA
(Bonferroni, 1936); the required effect sizes make it smaller still.

A Monte Carlo test (Barnard, 1963) compares a statistic with the same statistic of R replicas drawn
under the hypothesis: p = (1 + #{T_r ≥ T}) / (R + 1) is exact for any R.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import check_finite, parse, rows_of
from doxa.errors import DataError, ShapeError, Unavailable
from doxa.likelihoods import Affine, Heads, Likelihood, ScaledNoise
from doxa.noise import generator
from doxa.posterior import Posterior, SamplePosterior, TransformedPosterior
from doxa.predictive import Predictive

ALPHA = 1e-3
TESTS = 9
REPLICAS = 1999


def monte_carlo(observed: Tensor, replicas: Tensor) -> float:
    """p-value: the probability of a replica at least as large as the observed value."""
    return (1 + int((replicas >= observed).sum())) / (1 + replicas.numel())


def two_sided(observed: Tensor, replicas: Tensor) -> float:
    """Twice the smaller of the two one-sided probabilities, at most 1."""
    sides = monte_carlo(observed, replicas), monte_carlo(-observed, -replicas)
    return min(1.0, 2 * min(sides))


def binomial(successes: int, trials: int, probability: float) -> float:
    """Exact two-sided test: the total probability of all counts no likelier than the observed."""
    log_mass = _log_binomial(trials, probability)
    as_unlikely = log_mass <= log_mass[successes] + 1e-7  # ties up to rounding
    return min(1.0, float(log_mass[as_unlikely].exp().sum()))


def binomial_upper(successes: int, trials: int, probability: float) -> float:
    """P(K ≥ successes), exactly."""
    return min(1.0, float(_log_binomial(trials, probability)[successes:].exp().sum()))


def _log_binomial(trials: int, probability: float) -> Tensor:
    """log P(K = k) for k = 0 … n."""
    k = torch.arange(trials + 1, dtype=torch.float64)
    n, p = k[-1], torch.tensor(probability, dtype=torch.float64)
    choose = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return choose + torch.xlogy(k, p) + torch.special.xlog1py(n - k, -p)


def normal_upper(z: float) -> float:
    """P(Z ≥ z) of a standard normal."""
    return float(0.5 * torch.erfc(torch.tensor(z, dtype=torch.float64) / 2**0.5))


def normal_quantile(level: float) -> float:
    """z with P(Z ≤ z) = level."""
    return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))


def mean_above_zero(values: Tensor) -> float:
    """p-value of the mean if the true mean were zero: one-sided, by the central limit theorem.
    It is 1 for a single value."""
    if len(values) < 2:
        return 1.0
    spread = float(values.double().std()) / len(values) ** 0.5
    mean = float(values.double().mean())
    if spread == 0:
        return 0.0 if mean > 0 else 1.0
    return normal_upper(mean / spread)


def kolmogorov(u: Tensor) -> Tensor:
    """The largest distance of the empirical distribution of u [..., N] in (0, 1) from uniform."""
    ordered = u.sort(-1).values
    n = u.shape[-1]
    steps = torch.arange(1, n + 1, dtype=u.dtype, device=u.device) / n
    above, below = (steps - ordered).amax(-1), (ordered - steps + 1 / n).amax(-1)
    return torch.maximum(above, below)


_MOST_REPLICATED = 1 << 25  # numbers


def family(likelihood: Likelihood) -> Likelihood:
    """The likelihood without its affine maps to the units of y, and without factors on its
    noise."""
    while isinstance(likelihood, Affine | ScaledNoise):
        likelihood = likelihood.base
    return likelihood


class Scored:
    """Quantities of one head at N rows, on the CPU and in double precision.

    The tests need independent values. The elements of one target (pixels, outputs) are dependent,
    so one element is drawn at random for each row; `y`, `mean` and the rest are then [N].
    """

    def __init__(
        self, p: Predictive, y: Any, seed: int, functions: Callable[[int], Tensor] | None = None
    ) -> None:
        self.p = p
        self.seed = seed
        self.functions = functions  # joint draws over the rows, if p has only marginals
        self.likelihood: Likelihood = p.likelihood
        self.targets = p.targets(y)  # [N, *event]
        targets = self.targets.cpu()
        self.event = tuple(targets.shape[1:])
        flat = targets.reshape(len(targets), -1)
        counted = self._counted(flat)
        self.rows = counted.any(1).nonzero().squeeze(1)
        if len(self.rows) == 0:
            raise DataError("every target is ignored: there is nothing to evaluate")
        dice = torch.rand(flat.shape, generator=generator(seed, "doctor", "element"))
        self.element = torch.where(counted, dice, -1.0).argmax(1)[self.rows]
        self.y = flat[self.rows, self.element]

    def _counted(self, flat: Tensor) -> Tensor:
        base = family(self.likelihood)
        if base.ignore_index is not None:
            return flat != base.ignore_index
        return torch.ones_like(flat, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.rows)

    def one(self, values: Tensor, lead: int = 0) -> Tensor:
        """The drawn element of each row, in double precision: [*lead, N, *event] to [*lead, N]."""
        flat = values.detach().cpu().double().reshape(*values.shape[: lead + 1], -1)
        return flat[..., self.rows, self.element]

    @property
    def classifies(self) -> bool:
        return self.likelihood.classifies

    @cached_property
    def mean(self) -> Tensor:
        return self.one(self.p.mean)

    @cached_property
    def variance(self) -> Tensor:
        return self.one(self.p.variance)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._of_moments("aleatoric")

    @cached_property
    def epistemic(self) -> Tensor:
        """Epistemic variance [N]; for classes the sum over class probabilities."""
        return self._of_moments("epistemic")

    def _of_moments(self, name: str) -> Tensor:
        values = getattr(self.p, name)
        if family(self.likelihood).class_axis:
            values = values.sum(1)
        return self.one(values)

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities: [N, C]."""
        probs = self.p.probs
        if self.likelihood.binary:
            yes = self.one(probs)
            return torch.stack([1.0 - yes, yes], 1)
        table = probs.detach().cpu().double().reshape(*probs.shape[:2], -1)[self.rows]
        index = self.element.reshape(-1, 1, 1).expand(-1, table.shape[1], 1)
        return table.gather(2, index)[..., 0]

    @cached_property
    def z(self) -> Tensor:
        """(y − E[y]) / std[y]."""
        return (self.y.double() - self.mean) / self.variance.sqrt()

    @cached_property
    def replicas(self) -> Tensor:
        """Targets drawn from the posterior predictive at these rows, [R, N]. Each replica is one
        function plus noise, so that it includes errors that rows share."""
        size = max(1, self.p.mean.numel())
        if size * REPLICAS > _MOST_REPLICATED:
            raise Unavailable(f"{REPLICAS} replicas of {size} targets do not fit in memory")
        if self.functions is None:
            return self.one(self.p.sample(REPLICAS, seed=self.seed), 1)
        f = self.one(self.functions(REPLICAS), 1)
        dice = torch.randn(f.shape, generator=generator(self.seed, "doctor", "noise")).double()
        return f + self.aleatoric.sqrt() * dice

    @cached_property
    def log_prob(self) -> Tensor:
        """log p(y) of each row, over all its elements."""
        return self.p.log_prob(self.targets).detach().cpu().double()[self.rows]


MOST_ROWS = 500  # per set, for checks that need predictions
MOST_DATA = 20_000  # per set, for checks that need only the rows


@dataclass(frozen=True)
class Sample:
    """Rows as given, and the name of their set."""

    name: str
    x: Any
    y: Any

    def __len__(self) -> int:
        return rows_of(self.x, f"{self.name} x")

    def thinned(self, most: int, seed: int) -> Sample:
        """At most `most` rows, drawn without replacement, in their original order."""
        if len(self) <= most:
            return self
        order = torch.randperm(len(self), generator=generator(seed, "doctor", self.name))
        index = order[:most].sort().values
        x, y = (tree_map(lambda t: t[index.to(t.device)], part) for part in (self.x, self.y))
        return Sample(self.name, x, y)

    @cached_property
    def columns(self) -> Tensor:
        """Float inputs as a table in double precision: [N, D]."""
        if not isinstance(self.x, Tensor) or not self.x.is_floating_point():
            raise Unavailable("x is not one table of floating-point numbers")
        return self.x.double().cpu().reshape(len(self), -1)


@dataclass(frozen=True)
class Head:
    """One output of the model with its own likelihood, at the training rows and the test rows."""

    label: str
    train: Scored
    test: Scored | None

    @property
    def unseen(self) -> Scored:
        """The test rows if there are any, else the training rows."""
        return self.train if self.test is None else self.test


class DiagnosticData:
    """A posterior and its training and test rows. The rows are checked, and predictions are
    computed once."""

    def __init__(self, posterior: Posterior, data: Any, test: Any, level: float, seed: int) -> None:
        self.posterior, self.level, self.seed = posterior, level, seed
        self.train = _sample("train", posterior.ordered_pair(data), seed)
        self.test = None if test is None else _sample("test", posterior.ordered_pair(test), seed)
        self.base = posterior
        while isinstance(self.base, TransformedPosterior):
            self.base = self.base.base

    @property
    def rows(self) -> int:
        """The number of training rows: from the diagnostics of the fit, else as given."""
        return int(self.posterior.diagnostics.get("rows", len(self.train)))

    @cached_property
    def few(self) -> Sample:
        """Training rows for checks that need predictions."""
        return self.train.thinned(MOST_ROWS, self.seed)

    @cached_property
    def heads(self) -> list[Head]:
        train = self._scored(self.few)
        test = None
        if self.test is not None:
            test = self._scored(self.test.thinned(MOST_ROWS, self.seed))
        label = (lambda i: f" (head {i})") if len(train) > 1 else (lambda i: "")
        return [
            Head(label(i), own, None if test is None else test[i]) for i, own in enumerate(train)
        ]

    def _scored(self, sample: Sample) -> list[Scored]:
        p = self.posterior.predict(sample.x)
        if isinstance(p.likelihood, Heads):
            pairs = zip(p.heads, sample.y, strict=True)
            return [Scored(head, y, self.seed + i) for i, (head, y) in enumerate(pairs)]
        closed = p.likelihood.is_normal and not p.has_samples
        if not closed or self.base is not self.posterior:
            return [Scored(p, sample.y, self.seed)]
        return [Scored(p, sample.y, self.seed, lambda n: self.base.functions(sample.x, n))]

    @property
    def kept(self) -> tuple[int, int] | None:
        """(members, draws per member) if the posterior keeps draws, else None."""
        if not isinstance(self.base, SamplePosterior):
            return None
        return self.base.samples.shape[0], self.base.samples.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether the draws are a Markov chain; those of particles and ensembles are not."""
        return isinstance(self.base, SamplePosterior) and self.base.chain

    @property
    def is_point(self) -> bool:
        """Whether the posterior is a single function, without epistemic uncertainty."""
        return self.kept == (1, 1)


def _sample(name: str, data: Any, seed: int) -> Sample:
    x, y, source = parse(data)
    if source is not None:
        order = torch.randperm(len(source), generator=generator(seed, "doctor", name))
        x, y = source.take(order[:MOST_ROWS].sort().values)
    sample = Sample(name, x, y)
    if len(sample) == 0:
        raise DataError(f"the {name} data has no rows (N = 0)")
    if rows_of(y, f"{name} y") != len(sample):
        raise ShapeError(f"{name}: {len(sample)} rows of x, {rows_of(y, 'y')} of y")
    check_finite(x, f"{name} x")
    check_finite(y, f"{name} y")
    return sample.thinned(MOST_DATA, seed)
