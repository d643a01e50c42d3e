"""The neural process: a latent variable for the function, beside a deterministic path.

    r = ρ(mean φ(x_i, y_i)),   z ~ q(z | C) from a second such encoder,   y_j ~ N(μ(x_j, r, z), σ²)

Garnelo, Schwarz, Rosenbaum, Viola, Rezende, Eslami & Teh (2018), "Neural processes", with the
deterministic path of Kim et al. (2019), appendix A. One z is one function, and the variance between
draws of z is epistemic. The bound, for `np` and `anp`, is

    z ~ q(z | C) = N(m(C), diag s(C)²),   s = 0.1 + 0.9 sigmoid,    y_j ~ N(μ(x_j, z, r(C)), σ²)

    log p(y_T | x_T, C) ≥ E_q[Σ_T log p(y_j | x_j, z, C)] − KL(q ‖ q(z | C)),   q = q(z | C ∪ T)

Garnelo et al. (2018b), equation 9. With K draws, log (1/K) Σ_k w_k, w = p(y_T | z) q(z | C) / q(z |
C ∪ T), lies between the two (Burda et al., 2016). The objective is the bound divided by the number
of points that it counts. `reconstruct` also counts the points of the context (Kim et al., 2019):
the fit to the context is better, but the objective is not a bound on the targets alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data import Batch
from doxa.method import Clock, Run, State
from doxa.method.method import flag, one_of, positive, whole
from doxa.neural.base import Amortised, members_axis
from doxa.neural.blocks import Pooled, Task, at_targets, mlp


class Drawn(NamedTuple):
    """The outputs f [B, K, N, 2·O] of K functions; log q(z | C) − log q(z | all) of each, [B, K];
    and KL(q(z | all) ‖ q(z | C)), [B]. The last two are 0 if z was drawn given the context alone.
    """

    f: Tensor
    log_ratio: Tensor
    kl: Tensor


class LatentNet(nn.Module):
    """A deterministic path to each target (`direct`), a latent path, and a decoder of both.

    direct: from (x, y, mask, target_x) to [..., N, width].
    """

    def __init__(
        self, direct: nn.Module, latent: Pooled, inputs: int, outputs: int, width: int, depth: int
    ) -> None:
        super().__init__()
        self.direct, self.latent = direct, latent
        self.decoder = mlp(2 * width + inputs, width, 2 * outputs, max(2, depth - 1))

    def forward(self, task: Task, eps: Tensor, target_y: Tensor | None = None) -> Drawn:
        """The outputs for eps [B, K, L], standard normals. With target_y, z is drawn given all
        points."""
        context = task["context_x"], task["context_y"], task["context"]
        target_x = task["target_x"]
        if target_y is None:
            mean, std = self.latent_moments(*context)  # [B, L]
            z = mean.unsqueeze(-2) + std.unsqueeze(-2) * eps
            ratio, kl = torch.zeros_like(z[..., 0]), torch.zeros_like(mean[..., 0])
        else:
            seen = task["context"] + task["targets"]
            everything = target_x, target_y, seen
            both = (torch.stack(parts) for parts in zip(context, everything, strict=True))
            (mean, own), (std, spread) = self.latent_moments(*both)  # in one pass, [2, B, L]
            z = own.unsqueeze(-2) + spread.unsqueeze(-2) * eps
            away = (z - mean.unsqueeze(-2)) / std.unsqueeze(-2)
            logs = (spread / std).log()
            ratio = (0.5 * (eps.square() - away.square()) + logs.unsqueeze(-2)).sum(-1)
            kl = 0.5 * ((spread / std).square() + ((own - mean) / std).square() - 1 - 2 * logs)
            kl = kl.sum(-1)
        direct = self.direct(*context, target_x).unsqueeze(-3)  # [B, 1, N, W]
        shape = (*z.shape[:-1], *target_x.shape[-2:-1], -1)
        parts = (direct.expand(shape), at_targets(z, target_x),
                 target_x.unsqueeze(-3).expand(shape))  # fmt: skip
        return Drawn(self.decoder(torch.cat(parts, -1)), ratio, kl)

    def latent_moments(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of z given some points."""
        mean, raw = self.latent(x, y, mask).chunk(2, -1)
        return mean, 0.1 + 0.9 * torch.sigmoid(raw)


@dataclass(frozen=True)
class Latent(Amortised):
    """Shared by np and anp: their fields and the bound."""

    latent: ClassVar[bool] = True

    width: int = whole(128, least=1)
    depth: int = whole(4, least=1)
    min_std: float = positive(0.1)
    bound: str = one_of("multi-sample", "elbo")
    samples: int = whole(4, least=1)
    reconstruct: bool = flag(True)

    def bound_of(
        self, run: Run, params: State, batch: Batch, clock: Clock | None, fixed: tuple[Any, ...]
    ) -> Tensor:
        x, points = batch.x["target_x"], batch.points
        assert points is not None
        if clock is None:  # at the mean of z given the context
            eps = x.new_zeros(run.size, x.shape[-3], 1, self.width)
            return self.at_points(self.called(run, params, batch, eps).f[:, :, 0], batch)
        eps = clock.rows("normal", x.shape[-3], self.samples, self.width)
        y = members_axis(batch.y, batch)
        drawn: Drawn = self.called(run, params, batch, eps, y)
        points = members_axis(self.counted(batch), batch)
        shape = (*drawn.f.shape[:-1], y.shape[-1])
        each = self.likelihood.log_prob(drawn.f, y.unsqueeze(2).expand(shape), {}, lead=3)
        fits = (each * points.unsqueeze(2)).sum(-1)  # [M, B, K]
        return self.bounded(fits, drawn) / points.sum(-1)

    def bounded(self, fits: Tensor, drawn: Drawn) -> Tensor:
        """The bound on log p of each task, from the log-likelihood under each draw, [..., K]."""
        if self.bound == "elbo":
            return fits.mean(-1) - drawn.kl
        return torch.logsumexp(fits + drawn.log_ratio, -1) - math.log(fits.shape[-1])


class PooledPath(nn.Module):
    """The same vector for every target."""

    def __init__(self, inputs: int, outputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.encoder = Pooled(inputs + outputs, width, width, depth)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, target_x: Tensor) -> Tensor:
        return at_targets(self.encoder(x, y, mask), target_x)


@store.register("np")
@dataclass(frozen=True)
class NeuralProcess(Latent):
    """Functions drawn by a latent variable, given the mean of an encoded context.

    Parameters
    ----------
    width : int
        Hidden units of every layer, numbers of the code and of z.
    depth : int
        Layers of the encoders; the decoder has one layer less.
    min_std : float
        The least standard deviation of the noise, in fitted units.
    bound : str
        "multi-sample" (importance-weighted), or the "elbo".
    samples : int
        Draws of z per task and step.
    reconstruct : bool
        Whether the bound also counts the points of the context.
    """

    name: ClassVar[str] = "np"

    def network(self, inputs: int, outputs: int) -> nn.Module:
        w, d = self.width, self.depth
        path = PooledPath(inputs, outputs, w, d)
        latent = Pooled(inputs + outputs, w, 2 * w, d)
        return LatentNet(path, latent, inputs, outputs, w, d)
