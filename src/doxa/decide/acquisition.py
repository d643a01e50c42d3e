"""Acquisition functions: the value of a label, one score per row, [N]; larger is better.

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

EPIG is the information of a label about the predictions at target rows x*:

    EPIG(x) = E_{x*}[ I[y; y*] ],     p(y, y*) = E_s p(y | f_s) p(y* | f_s)

Bickford Smith, Kirsch, Farquhar, Gal, Foster & Rainforth (2023). BALD also values information about
the function far from the target rows; EPIG does not. For numbers with Gaussian noise y and y* are
taken as jointly normal, I = −½ log(1 − ρ²), with ρ their correlation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from doxa.errors import MethodError, ShapeError, Unavailable, did_you_mean
from doxa.noise import generator
from doxa.predictive import Predictive


def class_probs(p: Predictive) -> tuple[Tensor, Tensor]:
    """(weights [S], probabilities [S, N, C]) in float64; for Bernoulli C = 2, no and yes."""
    logits = p.samples.double()
    if p.likelihood.binary:
        yes = _one_label(logits.sigmoid(), 2)
        return p.weights.double(), torch.stack([1.0 - yes, yes], 2)
    return p.weights.double(), _one_label(logits.softmax(2), 3)


def _one_label(probs: Tensor, axes: int) -> Tensor:
    """The probabilities without trailing axes of length one; rows with several labels are
    refused."""
    if probs.shape[axes:].numel() != 1:
        raise ShapeError(
            f"rows have {probs.shape[axes:].numel()} labels each: what several rows teach together "
            "is counted for one label a row"
        )
    return probs.reshape(probs.shape[:axes])


def scaled_functions(p: Predictive) -> tuple[Tensor, Tensor]:
    """(z, noise) in float64, for numbers with Gaussian noise.

    z [S, N, D] are the functions minus their mean, times √weight, so that zᵀz is their covariance.
    noise [N, D] is the variance of y given f, averaged over the functions.
    """
    if not p.likelihood.is_normal:
        raise Unavailable(
            f"what several rows teach together is known of classes and of numbers with Gaussian "
            f"noise, not of a {p.likelihood.name} predictive"
        )
    means, weights = p.samples.double(), p.weights.double()
    means = means.reshape(*means.shape[:2], -1)
    centre = torch.einsum("s,snd->nd", weights, means)
    z = (means - centre) * weights.sqrt()[:, None, None]
    return z, p.aleatoric.double().reshape(centre.shape)


Acquisition = Callable[[Predictive], Tensor]


def predictive_variance(p: Predictive) -> Tensor:
    """Var[y]; for classes the sum over classes of p̄ (1 − p̄)."""
    if not p.likelihood.classifies:
        return _outputs(p.variance)
    total = 2.0 * p.variance if p.likelihood.binary else p.variance.sum(1)
    return _labels(total)


def max_entropy(p: Predictive) -> Tensor:
    """H[y] in nats: the total uncertainty of the prediction."""
    if p.likelihood.classifies:
        return _labels(p.entropy)
    try:
        return _outputs(p.entropy)
    except Unavailable:  # for a mixture of densities: the entropy of the normal with its variance
        return _outputs(p.moment_matched().entropy)


def bald(p: Predictive) -> Tensor:
    """I[y; f] in nats: the information of a label about the function."""
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
    if p.likelihood.binary:
        return _labels(torch.minimum(votes, 1.0 - votes))
    return _labels(1.0 - votes.amax(1))


def variation_ratio_of_mean(p: Predictive) -> Tensor:
    """`variation_ratio` with kind="mean", under a name of its own."""
    return variation_ratio(p, "mean")


def mean_std(p: Predictive) -> Tensor:
    """The standard deviation over draws of the probability of each class, or of the mean of each
    output, averaged over classes or outputs."""
    spread = p.epistemic.clamp_min(0.0).sqrt()
    if p.likelihood.classifies and not p.likelihood.binary:
        spread = spread.mean(1)
    return _labels(spread)


def margin(p: Predictive) -> Tensor:
    """How close the second class comes to the first: 1 − (p̄₍₁₎ − p̄₍₂₎)."""
    probs = p.probs
    if p.likelihood.binary:
        return _labels(1.0 - (2.0 * probs - 1.0).abs())
    first, second = probs.topk(2, 1).values.unbind(1)
    return _labels(1.0 - (first - second))


def random(p: Predictive, seed: int = 0) -> Tensor:
    """Random scores, as a baseline."""
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
    """A score by its name; a function of a predictive is returned as it is."""
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


_BLOCK = 1 << 24  # numbers in a joint table


def epig(p: Predictive, p_target: Predictive) -> Tensor:
    """EPIG of each row, [N], in nats. `p_target` is the prediction at rows x* like those of later
    predictions, with the same draws: `posterior.predict(x_target, n, seed)` with the n and seed of
    `p`."""
    if p.likelihood.classifies:
        return _classes(class_probs(p), class_probs(p_target)).to(p.mean)
    return _numbers(scaled_functions(p), scaled_functions(p_target)).to(p.mean)


def _check(own: Tensor, other: Tensor) -> None:
    if own.shape[0] != other.shape[0] or own.shape[2] != other.shape[2]:
        raise ShapeError(
            f"p has {own.shape[0]} draws of {own.shape[2]} outputs, p_target {other.shape[0]} of "
            f"{other.shape[2]}: predict both with the same n and seed"
        )


def _classes(own: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    (weights, probs), (_, others) = own, target
    _check(probs, others)
    entropy = _entropy_of_mean(weights, others).mean()
    table = others.flatten(1)  # [S, T·C]
    each = []
    for some in probs.split(max(1, _BLOCK // (table.shape[1] * probs.shape[2])), 1):
        weighted = (some * weights[:, None, None]).flatten(1)
        joint = (weighted.t() @ table).reshape(some.shape[1], some.shape[2], *others.shape[1:])
        both = torch.special.entr(joint).sum((1, 3)).mean(1)  # H[y, y*], [n]
        each.append(_entropy_of_mean(weights, some) + entropy - both)
    return torch.cat(each).clamp_min(0.0)


def _entropy_of_mean(weights: Tensor, probs: Tensor) -> Tensor:
    return torch.special.entr(torch.einsum("s,snc->nc", weights, probs)).sum(1)


def _numbers(own: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over x*, and the sum over outputs of a row with several."""
    (z, noise), (others, other_noise) = own, target
    _check(z, others)
    variance = z.square().sum(0) + noise  # [N, D]
    other_variance = others.square().sum(0) + other_noise  # [T, D]
    each = []
    for some, spread in zip(
        *(t.split(max(1, _BLOCK // others[0].numel()), d) for t, d in ((z, 1), (variance, 0))),
        strict=True,
    ):
        shared = torch.einsum("snd,std->ntd", some, others)
        squared = shared.square() / (spread.unsqueeze(1) * other_variance)
        each.append(-0.5 * torch.log1p(-squared).sum(2).mean(1))
    return torch.cat(each)
