"""The conditional neural process.

    r = [ρ_1(mean_{i in C} φ_1(x_i, y_i)), ρ_2(mean_{i in C} φ_2(x_i, y_i))]
    μ_j, s_j = decoder(r, x_j),    y_j ~ N(μ_j, σ_j²)

Garnelo, Rosenbaum, Maddison, Ramalho, Saxton, Shanahan, Teh, Rezende & Eslami (2018), "Conditional
neural processes". It has two encoders like `np`, as in the comparison of Nguyen & Grover (2022).
Points are predicted separately given the context: each has a mean and a standard deviation, and
there are no draws of whole functions. The mean over the context underfits; `anp` and `tnp` attend
to each point of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from doxa import store
from doxa.method.method import flag, positive, whole
from doxa.neural.base import Amortised
from doxa.neural.blocks import Pooled, Task, at_targets, mlp, pairs


class ConditionalNet(nn.Module):
    """Two encoders of the context and a decoder at each target."""

    def __init__(self, inputs: int, outputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(
            Pooled(inputs + outputs, width, width, depth) for _ in range(2)
        )
        self.decoder = mlp(2 * width + inputs, width, 2 * outputs, max(2, depth - 1))

    def forward(self, task: Task) -> Tensor:
        context, x = (task["context_x"], task["context_y"], task["context"]), task["target_x"]
        code = torch.cat([encoder(*context) for encoder in self.encoders], -1)
        return self.decoder(pairs(at_targets(code, x), x))


@store.register("cnp")
@dataclass(frozen=True)
class CNP(Amortised):
    """A mean and a spread at each point from the mean of an encoded context.

    Parameters
    ----------
    width : int
        Hidden units of every layer, and numbers of the code of each of two encoders.
    depth : int
        Layers of the encoders; the decoder has one layer less.
    min_std : float
        The least standard deviation of the noise, in fitted units.
    reconstruct : bool
        Whether the points of the context are also predicted in training, as in the paper.

    Examples
    --------
    >>> import torch, doxa
    >>> tasks = [(x, a * x) for a in (-1.0, 0.5, 2.0) for x in [torch.linspace(-1, 1, 20)[:, None]]]
    >>> posterior = doxa.fit(None, doxa.data.Tasks(tasks), doxa.CNP(width=16), steps=20)
    >>> x, y = tasks[1]
    >>> posterior.condition(x[:5], y[:5]).predict(x).mean.shape
    torch.Size([20, 1])
    """

    name: ClassVar[str] = "cnp"

    width: int = whole(128, least=1)
    depth: int = whole(4, least=1)
    min_std: float = positive(0.1)
    reconstruct: bool = flag(True)

    def network(self, inputs: int, outputs: int) -> nn.Module:
        return ConditionalNet(inputs, outputs, self.width, self.depth)
