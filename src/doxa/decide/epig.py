"""EPIG: how much a label would teach about the predictions that matter.

    EPIG(x) = E_{x*}[ I[y; y*] ],     p(y, y*) = E_s p(y | f_s) p(y* | f_s)

Bickford Smith, Kirsch, Farquhar, Gal, Foster & Rainforth (2023). BALD also wants what only concerns
the function far from where it will be used; this does not. For numbers with Gaussian noise y and y*
are taken as jointly normal, I = −½ log(1 − ρ²), with ρ their correlation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.decide.draws import class_probs, scaled_functions
from doxa.errors import ShapeError
from doxa.predictive import Predictive

_BLOCK = 1 << 24  # numbers in a joint table


def epig(p: Predictive, p_target: Predictive) -> Tensor:
    """[N], in nats. `p_target` is predicted at rows x* like those that will be asked about, with
    the same draws: `posterior.predict(x_target, n, seed)` with the n and seed of `p`."""
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
