"""MCMC diagnostics: R-hat, effective sample sizes, E-BFMI, and export to ArviZ.

Rank-normalised split R-hat, and bulk and tail effective sample sizes, after Vehtari, Gelman,
Simpson, Carpenter & Bürkner (2021). Draws are replaced by normal scores of their ranks,

    z = Φ⁻¹((r − 3/8) / (S + 1/4)),    R̂² = (W (L−1)/L + B/L) / W,    ESS = S / (1 + 2 Σ_t ρ_t)

over 2K half-chains of length L. R-hat is the larger of two values: that of z, and that of the
folded |x − median|, which detects chains that differ in scale. The sum of autocorrelations is
Geyer's (1992) initial monotone sequence. Energies show whether the momenta of a Hamiltonian sampler
reach the tails (Betancourt, 2016):

    E-BFMI = Σ_t (E_t − E_{t−1})² / Σ_t (E_t − Ē)²

Every function takes draws [K chains, T draws, *entries] and works on all entries at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from doxa.errors import MissingExtra, ShapeError

LEAST_DRAWS = 4
_BLOCK = 1 << 20  # numbers at a time, where draws may be on disk


def rhat(draws: Tensor) -> Tensor:
    """Rank-normalised split R-hat: [*entries]; infinite where chains are constant and differ."""
    halves = split(draws)
    flatten_particles = (halves - _median(halves)).abs()
    return torch.maximum(_rhat(_normal_scores(halves)), _rhat(_normal_scores(flatten_particles)))


def ess_bulk(draws: Tensor) -> Tensor:
    """Effective sample size for the centre of the distribution: [*entries]."""
    return _ess(_normal_scores(split(draws)))


def ess_tail(draws: Tensor, probability: float = 0.05) -> Tensor:
    """The smaller of the effective sample sizes of both tails, at the quantiles p and 1 − p."""
    halves, flat = split(draws), draws.double().flatten(0, 1)
    levels = torch.tensor([probability, 1 - probability], dtype=flat.dtype, device=flat.device)
    low, high = torch.quantile(flat, levels, dim=0)
    tails = [_ess((halves <= bound).to(halves.dtype)) for bound in (low, high)]
    return torch.minimum(*tails)


def moved(draws: Tensor) -> Tensor:
    """The share of draws that differ from the draw before, for each chain: [K]."""
    count, length = draws.shape[:2]
    still = torch.zeros(count, dtype=torch.float64, device=draws.device)
    for start, stop in _blocks(draws[:, 1:]):
        same = draws[:, 1 + start : 1 + stop] == draws[:, start:stop]
        still += same.reshape(*same.shape[:2], -1).all(2).sum(1)
    return 1.0 - still / (length - 1)


def finite(draws: Tensor) -> Tensor:
    """Which draws are finite: [K, T]."""
    parts = []
    for start, stop in _blocks(draws):
        part = torch.isfinite(draws[:, start:stop])
        parts.append(part.reshape(*part.shape[:2], -1).all(2))
    return torch.cat(parts, 1)


def _blocks(draws: Tensor) -> Iterator[tuple[int, int]]:
    """Spans of draws [K, T, *entries], small enough that draws on disk need little memory."""
    length = draws.shape[1]
    step = max(1, _BLOCK * length // max(1, draws.numel()))
    return ((start, min(start + step, length)) for start in range(0, length, step))


def ebfmi(energy: Tensor) -> Tensor:
    """The energy's Bayesian fraction of missing information for each chain, [K, T] to [K].

    Below 0.3 the tails are explored too slowly. NaN where the energy is constant.
    """
    if energy.ndim != 2 or energy.shape[1] < LEAST_DRAWS:
        raise ShapeError(
            f"energies must be [chains, draws] with {LEAST_DRAWS} draws or more, "
            f"got {list(energy.shape)}"
        )
    energy = energy.double()
    change = energy.diff(dim=1).square().sum(1)
    return change / (energy - energy.mean(1, keepdim=True)).square().sum(1)


def to_arviz(values: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> Any:
    """Draws {name: [K, T, ...]} and sampler statistics {name: [K, T]} as an arviz DataTree, under
    the names that arviz uses."""
    try:
        import arviz_base
    except ImportError as error:
        raise MissingExtra(
            "to_arviz needs the extra 'diagnostics': pip install 'doxa[diagnostics]'"
        ) from error
    groups = {"posterior": {k: v.detach().cpu().numpy() for k, v in values.items()}}
    if stats:
        named = {_ARVIZ.get(k, k): v.detach().cpu().numpy() for k, v in stats.items()}
        if "diverging" in named:
            named["diverging"] = named["diverging"].astype(bool)
        groups["sample_stats"] = named
    return arviz_base.from_dict(groups)


_ARVIZ = {
    "log_density": "lp", "accept": "acceptance_rate", "divergent": "diverging",
    "divergence": "diverging", "diverged": "diverging", "depth": "tree_depth",
    "leapfrogs": "n_steps",
}  # fmt: skip


def split(draws: Tensor) -> Tensor:
    """Split each chain into its first and last half, in double precision: [2K, L, *entries]."""
    if draws.ndim < 2 or draws.shape[1] < LEAST_DRAWS:
        raise ShapeError(
            f"chains must be [chains, draws, ...] with {LEAST_DRAWS} draws or more, "
            f"got {list(draws.shape)}"
        )
    half = draws.shape[1] // 2
    return torch.cat([draws[:, :half], draws[:, draws.shape[1] - half :]]).double()


def _median(halves: Tensor) -> Tensor:
    ordered = halves.flatten(0, 1).sort(0).values
    count = len(ordered)
    return 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2])


def _normal_scores(halves: Tensor) -> Tensor:
    """Φ⁻¹ of the ranks over all chains; equal values share their average rank."""
    flat = halves.flatten(0, 1)  # [S, *entries]
    table = flat.reshape(len(flat), -1).T.contiguous()  # [E, S]
    ordered = table.sort(1).values
    below = torch.searchsorted(ordered, table)
    upto = torch.searchsorted(ordered, table, right=True)
    rank = 0.5 * (below + upto + 1).double()  # 1 … S
    scores: Tensor = torch.special.ndtri((rank - 0.375) / (table.shape[1] + 0.25))
    return scores.T.reshape(halves.shape)


def _rhat(parts: Tensor) -> Tensor:
    length = parts.shape[1]
    within = parts.var(1).mean(0)
    between = parts.mean(1).var(0) * length
    ratio = (within * (length - 1) + between) / (length * within)
    still = torch.where(between > 0, torch.inf, 1.0).to(ratio)
    return torch.where(within > 0, ratio, still).sqrt()


def _ess(parts: Tensor) -> Tensor:
    """[K, L, *entries] to [*entries]. Constant draws have the full sample size, because no estimate
    of autocorrelation distinguishes them from independent draws; `moved` detects them."""
    count, length = parts.shape[:2]
    total = count * length
    covariance = _autocovariance(parts).mean(0)  # [L, *entries], over chains
    within = covariance[0] * length / (length - 1)
    spread = covariance[0] + (parts.mean(1).var(0) if count > 1 else 0.0)
    rho = 1.0 - (within - covariance) / spread  # at lag 0 it is 1 by definition
    rho[0] = 1.0
    pairs = max(0, (length - 3) // 2)  # of lags; estimates at the longest lags use too few draws
    even, odd = rho[: 2 * pairs + 1 : 2], rho[1 : 2 * pairs : 2]
    sums = even[:pairs] + odd
    positive = (sums > 0).cumprod(0).bool()  # Geyer's initial positive sequence
    falling = torch.where(positive, sums, torch.inf).cummin(0).values
    tau = -1.0 + 2.0 * torch.where(positive, falling, 0.0).sum(0)
    first = positive.sum(0).clamp_max(len(even) - 1)  # the pair that ended it
    tau = tau + even.gather(0, first.unsqueeze(0)).squeeze(0).clamp_min(0.0)
    size = total / tau.clamp_min(1.0 / math.log10(total))
    return torch.where(spread > 0, size, float(total))


def _autocovariance(parts: Tensor) -> Tensor:
    """At every lag, by the fast Fourier transform: [K, L, *entries]."""
    length = parts.shape[1]
    centred = parts - parts.mean(1, keepdim=True)
    padded = 1 << (2 * length - 1).bit_length()
    power = torch.fft.rfft(centred, n=padded, dim=1).abs().square()
    products: Tensor = torch.fft.irfft(power, n=padded, dim=1)
    return products[:, :length] / length
