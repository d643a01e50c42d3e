"""The answer at x: what every predictive distribution can be asked.

For regression the law of total variance splits the spread of y over the draws s of the function,

    Var[y] = E_s Var[y | f_s]  +  Var_s E[y | f_s]
    total  = aleatoric         +  epistemic

and for classification entropy does the same: H[y] = E_s H[y | f_s] + I[y; f], the second term
being the mutual information (BALD). Both hold here exactly, because the left side is computed
as the sum. Spreads over draws are those of the draws themselves (1/S, not 1/(S-1)).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from doxa.errors import DataError, ShapeError, Unavailable
from doxa.likelihoods import Categorical, Likelihood


class Predictive:
    """p(y | x, data) at N inputs, in units of y. Build one with `from_samples` or `from_probs`.

    Everything has the rows N first. A quantity that this distribution does not have raises
    `Unavailable` (an AttributeError: `hasattr` says no) and says what to do instead.
    """

    likelihood: Likelihood

    @staticmethod
    def from_samples(
        f: Any,
        likelihood: str | Likelihood | Sequence[str | Likelihood],
        theta: Mapping[str, Tensor] | None = None,
        *,
        f_variance: Any = None,
        weights: Tensor | None = None,
        seed: int = 0,
        draws: int = 100,
    ) -> Predictive:
        """The mixture of S functions, or of S Gaussian marginals over functions.

        Parameters
        ----------
        f
            [S, N, *output], what the network gave for each draw; a tuple of them for several
            heads. Half precision is computed with in float32.
        likelihood
            By name, as an object, or a sequence for several heads. `Affine` if f is in fitted
            units.
        theta
            Learned likelihood parameters, [S, *own] or [*own]. Given ones (noise=0.1) are known
            to the likelihood already.
        f_variance
            [S, N, *output]: f is then the mean of a Gaussian for each draw, row and output.
            Closed form with a Gaussian likelihood; otherwise `draws` functions are drawn for
            each of the S.
        weights
            [S], equal when None; normalised.
        seed, draws
            Of the draws of f, where f_variance has no closed form.
        """
        from doxa.predictive.mixture import build

        return build(f, likelihood, theta, f_variance, weights, seed, draws)

    @staticmethod
    def from_probs(probs: Any, weights: Tensor | None = None) -> Predictive:
        """Class probabilities [N, C] of one model, or [S, N, C, *site] of S: anyone's
        predictions. `samples` are then their logarithms."""
        from doxa.predictive.mixture import build

        table = torch.as_tensor(probs)
        if not table.is_floating_point() or table.ndim < 2:
            raise ShapeError(f"probs must be floats [N, C] or [S, N, C], got {list(table.shape)}")
        table = table[None] if table.ndim == 2 else table
        if table.dtype in (torch.float16, torch.bfloat16):
            table = table.float()
        total = table.sum(2)
        wrong = ((total - 1.0).abs() > 1e-3) | (table < 0).any(2) | ~torch.isfinite(total)
        if bool(wrong.any()):
            row = wrong.nonzero()[0].tolist()[1]
            raise DataError(
                f"row {row} of probs is no distribution: it is negative or does not sum to 1 over "
                "the classes"
            )
        f = (table / total.unsqueeze(2)).log()
        return build(f, Categorical(), None, None, weights, 0, 1)

    @property
    def mean(self) -> Tensor:
        """E[y]: [N, *event]; for a categorical the class probabilities [N, C, *site]."""
        raise self._unavailable("mean")

    @property
    def aleatoric(self) -> Tensor:
        """E_s Var[y | f_s]: the noise that more data would not take away."""
        raise self._unavailable("aleatoric")

    @property
    def epistemic(self) -> Tensor:
        """Var_s E[y | f_s]: what the functions disagree about."""
        raise self._unavailable("epistemic")

    @property
    def variance(self) -> Tensor:
        """aleatoric + epistemic, elementwise in the shape of `mean`."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    @property
    def probs(self) -> Tensor:
        """Class probabilities: [N, C, *site]; for Bernoulli that of a 1, in y's shape."""
        if not self.likelihood.classifies:
            raise self._unavailable("probs", "it is for classification; use mean and std")
        return self.mean

    @property
    def expected_entropy(self) -> Tensor:
        """E_s H[y | f_s] in nats: [N, *event], [N, *site]."""
        raise self._unavailable("expected_entropy")

    @property
    def mutual_information(self) -> Tensor:
        """I[y; f] in nats, never negative: what a label would teach about the function."""
        return (self._marginal_entropy - self.expected_entropy).clamp_min(0.0)

    @property
    def entropy(self) -> Tensor:
        """H[y] in nats: expected_entropy + mutual_information."""
        return self.expected_entropy + self.mutual_information

    @property
    def variation_ratio(self) -> Tensor:
        """One minus the probability of the likeliest class; see `votes` for the count."""
        return 1.0 - self._largest(self.probs)

    def votes(self) -> Tensor:
        """The share of the draws that rank each class first: [N, C, *site]; for Bernoulli the
        share above one half. `1 - votes().max(1).values` is the variation ratio by counting."""
        raise self._unavailable("votes", "it is for classification")

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The q-quantile of each element of y: [N, *event], or [Q, N, *event] for a sequence."""
        raise self._unavailable("quantile")

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval (low, high) that holds y with probability `level`."""
        if not 0.0 < level < 1.0:
            raise DataError(f"level must lie between 0 and 1, got {level}")
        low, high = self.quantile([0.5 * (1.0 - level), 0.5 * (1.0 + level)])
        return low, high

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """n draws of y: [n, N, *event]. Each is one function at all rows, plus noise."""
        raise self._unavailable("sample")

    def log_prob(self, y: Any) -> Tensor:
        """log p(y) for each row, [N], y in its own units; class weights are left out."""
        raise self._unavailable("log_prob")

    @property
    def samples(self) -> Tensor:
        """[S, N, ...]: samples[s] is one function at all rows, in units of y; logits for
        classification, log rates for counts."""
        raise self._unavailable("samples")

    def moment_matched(self) -> Predictive:
        """The Gaussian with this mean and variance, which the deep-ensembles paper scores."""
        from doxa.predictive.summary import NormalPredictive

        if self.likelihood.discrete:
            raise self._unavailable("moment_matched", "it is for continuous targets")
        return NormalPredictive(
            self.likelihood, self.mean, self.aleatoric, self.epistemic, self.expected_entropy
        )

    @property
    def heads(self) -> tuple[Predictive, ...]:
        """One predictive for each head of a model with several."""
        raise self._unavailable("heads", "the model has one head: ask the predictive itself")

    @cached_property
    def _marginal_entropy(self) -> Tensor:
        if not self.likelihood.classifies:
            raise self._unavailable(
                "entropy",
                "a mixture of densities has no closed form for it; moment_matched().entropy is "
                "an upper bound",
            )
        return self.likelihood.entropy_of(self.mean)

    def _largest(self, probs: Tensor) -> Tensor:
        if isinstance(self.likelihood, Categorical):
            return probs.amax(1)
        return torch.maximum(probs, 1.0 - probs)

    def _unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        kind = self.likelihood.name
        reason = f": {instead}" if instead else ""
        return Unavailable(f"this {kind} predictive has no {quantity}{reason}")


def generator(seed: int, *purpose: object) -> Generator:
    """A CPU generator for one purpose: hashed, so that two purposes share no stream."""
    text = "/".join(map(str, (seed, *purpose)))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def check_levels(q: float | Sequence[float], like: Tensor) -> Tensor:
    """Quantile levels as a tensor, () or [Q]."""
    levels = torch.as_tensor(q, dtype=like.dtype, device=like.device)
    if levels.ndim > 1 or not bool(((levels > 0) & (levels < 1)).all()):
        raise DataError(f"quantile levels must lie between 0 and 1, got {q}")
    return levels


def check_rows(y: Tensor, rows: int) -> None:
    if y.shape[0] != rows:
        raise ShapeError(f"{y.shape[0]} targets for predictions at {rows} rows")
