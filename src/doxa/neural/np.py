"""The neural process: a latent variable for the function, beside a deterministic path.

    r = ρ(mean φ(x_i, y_i)),   z ~ q(z | C) from a second such encoder,   y_j ~ N(μ(x_j, r, z), σ²)

Garnelo, Schwarz, Rosenbaum, Viola, Rezende, Eslami & Teh (2018), "Neural processes", with the
deterministic path of Kim et al. (2019), appendix A. The bounds are in `doxa.neural.latent`. Draws
of z are whole functions, and what they disagree about is epistemic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from doxa import store
from doxa.neural.blocks import Pooled, at_targets
from doxa.neural.latent import Latent, LatentNet


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
    width: hidden units of every layer, numbers of the code and of z.
    depth: layers of the encoders; the decoder has one less.
    floor: the least standard deviation of the noise, in fitted units.
    bound: "multi-sample" (importance-weighted), or the "elbo".
    samples: draws of z a task and step.
    reconstruct: the context's points count in the bound, too.
    """

    name: ClassVar[str] = "np"

    def network(self, inputs: int, outputs: int) -> nn.Module:
        w, d = self.width, self.depth
        path = PooledPath(inputs, outputs, w, d)
        latent = Pooled(inputs + outputs, w, 2 * w, d)
        return LatentNet(path, latent, inputs, outputs, w, d)
