"""The components of a mixture: draws of f with what belongs to each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError, ModelError, ShapeError
from doxa.likelihoods import Bernoulli, Likelihood
from doxa.noise import generator


def as_draws(values: Any) -> Tensor:
    """[S, N, *output], floating, at least single precision."""
    f: Tensor = torch.as_tensor(values)
    if f.ndim < 2 or not f.is_floating_point():
        raise ShapeError(
            f"draws of f must be floats of shape [S, N, ...], got {f.dtype} {list(f.shape)}"
        )
    if f.shape[0] == 0:
        raise DataError("there are no draws: f has shape " + str(list(f.shape)))
    return f.float() if f.dtype in (torch.float16, torch.bfloat16) else f


def complete_theta(
    likelihood: Likelihood, theta: Mapping[str, Tensor] | None, f: Tensor
) -> dict[str, Tensor]:
    """Every likelihood parameter as [S, *own]; given ones are filled in from the likelihood."""
    theta, output = theta or {}, tuple(f.shape[2:])
    constants = likelihood.constants(output)
    complete = {}
    for name, default in {**likelihood.parameters(output), **constants}.items():
        if name not in theta and name not in constants:
            raise ModelError(
                f"a {likelihood.name} likelihood learns {name!r}: give its value in theta, or fix "
                "it in the likelihood (noise=..., scale=...)"
            )
        value = torch.as_tensor(theta.get(name, default)).to(device=f.device, dtype=f.dtype)
        if value.shape == default.shape:
            value = value.expand(f.shape[0], *default.shape)
        elif value.shape != (f.shape[0], *default.shape):
            raise ShapeError(
                f"theta[{name!r}] has shape {list(value.shape)}; {f.shape[0]} draws need "
                f"{[f.shape[0], *default.shape]}"
            )
        complete[name] = value
    return complete


def draw_functions(
    f: Tensor,
    f_variance: Tensor,
    theta: Mapping[str, Tensor],
    weights: Tensor,
    seed: int,
    draws: int,
    first: int = 0,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Replace each Gaussian over f by `draws` draws of it; f becomes [S * draws, N, *output].

    A component's noise depends on the seed and its number (`first` is that of the first one),
    so that chunks do not matter.
    """
    noise = torch.stack(
        [
            torch.randn(
                (draws, *f.shape[1:]),
                generator=generator(seed, "predictive", "f", s),
                dtype=f.dtype,
            )
            for s in range(first, first + f.shape[0])
        ]
    ).to(f.device)
    std = f_variance.to(f.dtype).clamp_min(0.0).sqrt()
    drawn = torch.addcmul(f.unsqueeze(1), std.unsqueeze(1), noise).flatten(0, 1)
    repeated = {name: value.repeat_interleave(draws, 0) for name, value in theta.items()}
    return drawn, repeated, weights.repeat_interleave(draws) / draws


def cast_votes(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Logits [S, N, C, *site] to each draw's vote, one-hot; [S, N, *event] of 0 and 1 for
    Bernoulli."""
    if isinstance(likelihood, Bernoulli):
        return (f > 0).to(f.dtype)
    return torch.zeros_like(f).scatter(2, f.argmax(2, keepdim=True), 1.0)
