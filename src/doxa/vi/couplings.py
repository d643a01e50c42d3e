"""A normalising flow that starts at the identity: couplings, then a shear.

    y = (I + A) g_L(… g_1(z)),   A strictly lower triangular
    g: splines or affine maps of one half of z, with parameters from a network of the other half

The halves alternate. Rational-quadratic splines (Durkan et al. 2019) act within [-5, 5] and are the
identity outside; affine maps (Dinh, Sohl-Dickstein & Bengio 2017) scale and shift. The shear has
all linear correlations. So, with scales outside the flow, the family contains all Gaussians, and
without couplings it is a Gaussian. Draws and log-determinants take one pass. The maps are those of
zuko.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from doxa.model.functional import Functional

_checked = Distribution._validate_args
from zuko.flows import MaskedAutoregressiveTransform  # noqa: E402
from zuko.lazy import LazyComposedTransform  # noqa: E402
from zuko.transforms import (  # noqa: E402
    AdditiveTransform,
    MonotonicAffineTransform,
    MonotonicRQSTransform,
)

Distribution._validate_args = _checked  # zuko switches off torch's checks of arguments globally

BINS = 8  # of a spline
_KINDS = {
    "spline": (MonotonicRQSTransform, ((BINS,), (BINS,), (BINS - 1,))),
    "affine": (MonotonicAffineTransform, ((), ())),
}


class Couplings(nn.Module):
    """z [..., features] to y, and log |dy/dz| [...].

    kind: "spline" or "affine". length: the couplings; 0: the shear alone. width: hidden units of a
    coupling's network.
    """

    def __init__(self, features: int, kind: str, length: int, width: int) -> None:
        super().__init__()
        univariate, shapes = _KINDS[kind]
        upwards = torch.arange(features)
        layers = [
            MaskedAutoregressiveTransform(
                features, passes=2, order=upwards if i % 2 == 0 else upwards.flip(0),
                univariate=univariate, shapes=shapes, hidden_features=(width,),
            )
            for i in range(length)
        ]  # fmt: skip
        layers.append(
            MaskedAutoregressiveTransform(
                features, univariate=AdditiveTransform, shapes=((),), hidden_features=()
            )
        )
        self.flow = LazyComposedTransform(*layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity, if there is a single weight (zuko's maps then have no network); else see
        `identity`."""
        for layer in self.flow.transforms:
            for value in getattr(layer, "phi", ()):
                nn.init.zeros_(value)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y, change = self.flow().call_and_ladj(z)
        return y, change


def identity(flow: Functional, rows: Tensor) -> Tensor:
    """Rows of parameters [M, Q] in which the last layer of each network is zero, so that y = z."""
    last = [
        f"flow.transforms.{i}.hyper.{len(layer.hyper) - 1}.{leaf}"
        for i, layer in enumerate(flow.net.flow.transforms)  # type: ignore[arg-type, union-attr]
        if hasattr(layer, "hyper")
        for leaf in ("weight", "bias")
    ]
    return rows.index_fill(1, flow.layout.index(last).to(rows.device), 0.0) if last else rows
