"""E_q log p(y | f) of each row under Gaussian marginals, and what natural gradients need of it.

    Gaussian noise          log p(y | μ) − v/2σ²
    one latent a target     Σ_q w_q log p(y | μ + √(2v) t_q)        (Gauss–Hermite)
    several (classes)       the mean over draws f = μ + √v ε

By Bonnet's and Price's theorems ∂/∂μ is E ∂log p/∂f and −2 ∂/∂v is λ = −E ∂²log p/∂f²: a row acts
on q like a Gaussian observation of precision λ (Khan & Lin, 2017). λ is kept at 0 or above, which
only a likelihood with heavy tails notices, at outliers; with several latents it is the mean of the
likelihood's curvature, which is exact for classes.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.likelihoods import Heads, Likelihood, Theta

_NODES = 20
Shape = tuple[int, ...]


@lru_cache(8)
@torch.inference_mode(False)  # whoever asks first: others may differentiate
def _hermite(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Nodes and weights for a standard normal. Made once: a recorded step sends none to a GPU."""
    at, weight = np.polynomial.hermite.hermgauss(_NODES)
    both = math.sqrt(2.0) * at, weight / math.sqrt(math.pi)
    nodes, weights = (torch.from_numpy(part).float().to(device, dtype) for part in both)
    return nodes, weights


def several_latents(likelihood: Likelihood, output: Shape) -> bool:
    """Whether a target depends on more than one output: noise is drawn for it."""
    if isinstance(likelihood, Heads):
        raise MethodError("a sparse process has one likelihood, not several heads: fit each alone")
    return likelihood.event(output) != tuple(output)


def expected_log_prob(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor, theta: Theta,
    output: Shape, noise: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """E log p(y_i | f_i), [M, B], for marginals [M, B, O]; and λ [M, B, O] where it is not found
    as a derivative. `noise` [M, B, K, O] are the draws for several latents."""
    shaped = (*mean.shape[:2], *output)
    if likelihood.integrates_normal:
        at = mean.reshape(shaped)
        bend = likelihood.curvature(at, theta, 1).diagonal(dim1=-2, dim2=-1)  # constant in f
        return likelihood.log_prob(at, y, theta, 1) - 0.5 * (variance * bend).sum(2), None
    std = variance.sqrt()
    if noise is None:
        at, weights = _hermite(mean.device, mean.dtype)
        f = mean + at[:, None, None, None] * std
    else:
        f = mean + noise.movedim(2, 0) * std
        weights = mean.new_full((len(f),), 1.0 / len(f))
    many = {k: v.expand(len(f), *v.shape) for k, v in theta.items()}
    f = f.reshape(-1, *shaped)
    each = torch.einsum("k,kmb->mb", weights, likelihood.log_prob(f, y, many, 2))
    if noise is None:
        return each, None
    with torch.no_grad():
        bend = likelihood.curvature(f, many, 2, y).diagonal(dim1=-2, dim2=-1).mean(0)
    return each, bend
