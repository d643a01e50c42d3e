"""How much a label would be worth: one score a row, [N], the larger the more it is wanted.

With p̄ = E_s p_s the averaged probabilities of a row and H the entropy in nats,

    maximum entropy      H[p̄]
    BALD                 H[p̄] − E_s H[p_s] = I[y; f]
    variation ratio      1 − (share of the draws that vote for the favourite),  or  1 − max_c p̄_c
    mean std             mean over c of  √(E_s p_sc² − p̄_c²)
    margin               1 − (largest p̄_c − second largest)
    predictive variance  Σ_c p̄_c (1 − p̄_c),  or  Var[y]

Houlsby et al. (2011); Gal, Islam & Ghahramani (2017). For numbers with Gaussian noise the entropies
are those of normals with the same variances, so that BALD = ½ log(Var[y] / σ²): exact where one
normal is predicted (a process, a linear model), and an upper bound for a mixture of draws. A row
with several outputs counts their sum, one with several labels (the pixels of an image) their mean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from doxa.errors import MethodError, Unavailable, did_you_mean
from doxa.likelihoods import Bernoulli
from doxa.noise import generator
from doxa.predictive import Predictive

Acquisition = Callable[[Predictive], Tensor]


def predictive_variance(p: Predictive) -> Tensor:
    """Var[y]; for classes the sum over classes of p̄ (1 − p̄)."""
    if not p.likelihood.classifies:
        return _outputs(p.variance)
    total = 2.0 * p.variance if isinstance(p.likelihood, Bernoulli) else p.variance.sum(1)
    return _labels(total)


def max_entropy(p: Predictive) -> Tensor:
    """H[y] in nats: how unsure the prediction is, for whatever reason."""
    if p.likelihood.classifies:
        return _labels(p.entropy)
    try:
        return _outputs(p.entropy)
    except Unavailable:  # a mixture of densities: that of the normal with its variance
        return _outputs(p.moment_matched().entropy)


def bald(p: Predictive) -> Tensor:
    """I[y; f] in nats: what a label would teach about the function."""
    if p.likelihood.classifies:
        return _labels(p.mutual_information)
    try:
        return _outputs(p.mutual_information)
    except Unavailable:
        gain = p.moment_matched().entropy - p.expected_entropy
        return _outputs(gain.clamp_min(0.0))


def variation_ratio(p: Predictive, kind: str = "votes") -> Tensor:
    """How little the favourite class is agreed on: by counting each draw's vote, as in the lecture,
    or ("mean") one minus the largest averaged probability, as in Gal et al. (2017).

    Examples
    --------
    >>> import torch, doxa
    >>> votes = torch.eye(5)[[1, 2, 1, 1, 4]]  # five draws, one row
    >>> p = doxa.Predictive.from_probs(votes.unsqueeze(1))
    >>> round(float(variation_ratio(p)), 6)
    0.4
    """
    if kind == "mean":
        return _labels(p.variation_ratio)
    if kind != "votes":
        raise MethodError(f"kind of a variation ratio is 'votes' or 'mean', not {kind!r}")
    votes = p.votes()
    if isinstance(p.likelihood, Bernoulli):
        return _labels(torch.minimum(votes, 1.0 - votes))
    return _labels(1.0 - votes.amax(1))


def variation_ratio_of_mean(p: Predictive) -> Tensor:
    """`variation_ratio` with kind="mean", under a name of its own."""
    return variation_ratio(p, "mean")


def mean_std(p: Predictive) -> Tensor:
    """The standard deviation over draws of each class's probability, or of each output's mean: the
    average of them."""
    spread = p.epistemic.clamp_min(0.0).sqrt()
    if p.likelihood.classifies and not isinstance(p.likelihood, Bernoulli):
        spread = spread.mean(1)
    return _labels(spread)


def margin(p: Predictive) -> Tensor:
    """How close the second class comes to the first: 1 − (p̄₍₁₎ − p̄₍₂₎)."""
    probs = p.probs
    if isinstance(p.likelihood, Bernoulli):
        return _labels(1.0 - (2.0 * probs - 1.0).abs())
    first, second = probs.topk(2, 1).values.unbind(1)
    return _labels(1.0 - (first - second))


def random(p: Predictive, seed: int = 0) -> Tensor:
    """Nothing but chance, which every other score has to beat."""
    return chance(len(p.mean), seed).to(p.mean)


def chance(rows: int, seed: int) -> Tensor:
    """A number in [0, 1) for each row, in float64 on the CPU."""
    return torch.rand(rows, generator=generator("acquisition", seed), dtype=torch.float64)


ACQUISITIONS: dict[str, Acquisition] = {
    "bald": bald,
    "max_entropy": max_entropy,
    "variation_ratio": variation_ratio,
    "variation_ratio_of_mean": variation_ratio_of_mean,
    "mean_std": mean_std,
    "margin": margin,
    "predictive_variance": predictive_variance,
}


def acquisition(by: str | Acquisition) -> Acquisition:
    """A score by its name, or anyone's function of a predictive."""
    if callable(by):
        return by
    name = by.replace("-", "_")
    if name not in ACQUISITIONS:
        raise MethodError(f"no acquisition {by!r}{did_you_mean(name, ACQUISITIONS)}")
    return ACQUISITIONS[name]


def _labels(each: Tensor) -> Tensor:
    """[N, *site] to [N]: the mean over the labels of a row."""
    return each if each.ndim == 1 else each.flatten(1).mean(1)


def _outputs(each: Tensor) -> Tensor:
    """[N, *event] to [N]: the sum over the outputs of a row."""
    return each if each.ndim == 1 else each.flatten(1).sum(1)
