"""The attentive neural process: targets attend to the points of the context.

    r_j = Σ_{i in C} attention(x_j, x_i) v(x_i, y_i, C),  z ~ q(z | C),  y_j ~ N(μ(x_j, r_j, z), σ²)

Kim, Mnih, Schwarz, Garnelo, Eslami, Rosenbaum, Vinyals & Teh (2019), "Attentive neural processes".
Both paths have self-attention among the points of the context; the deterministic path has
multi-head cross-attention. Attention costs |C|·(|C| + targets). The bounds are in `doxa.neural.np`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from doxa import store
from doxa.errors import MethodError
from doxa.method.method import whole
from doxa.neural.blocks import Attended, Pooled
from doxa.neural.np import Latent, LatentNet


@store.register("anp")
@dataclass(frozen=True)
class AttentiveNP(Latent):
    """A neural process whose targets attend to the context.

    Parameters
    ----------
    width : int
        Hidden units of every layer, numbers of the code and of z.
    depth : int
        Layers of the encoders before attention, plus two; the decoder has one layer less.
    min_std : float
        The least standard deviation of the noise, in fitted units.
    bound : str
        "multi-sample" (importance-weighted), or the "elbo".
    samples : int
        Draws of z per task and step.
    reconstruct : bool
        Whether the bound also counts the points of the context.
    heads : int
        Number of attention heads; it divides the width.
    """

    name: ClassVar[str] = "anp"

    heads: int = whole(8, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        divides(self.width, self.heads)

    def network(self, inputs: int, outputs: int) -> nn.Module:
        w, d = self.width, self.depth
        before = max(1, d - 2)
        path = Attended(inputs, outputs, w, before, self.heads)
        latent = Pooled(inputs + outputs, w, 2 * w, before, self.heads)
        return LatentNet(path, latent, inputs, outputs, w, d)


def divides(width: int, heads: int) -> None:
    if width % heads:
        raise MethodError(f"width must be a multiple of heads: {width} is none of {heads}")
