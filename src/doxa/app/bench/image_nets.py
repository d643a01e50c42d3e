"""The networks of the image tables that `doxa.nets` does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doxa.nets import register_net


@register_net("unet")
def unet(inputs: int = 3, outputs: int = 11, width: int = 24, dropout: float = 0.0) -> nn.Module:
    """A small U-Net (Ronneberger et al. 2015) with GroupNorm: two halvings, two doublings.

    `dropout` drops whole channels after the deepest block and the one that follows it, as Bayesian
    SegNet (Kendall et al. 2015) does in its centre.
    """
    return UNet(inputs, outputs, width, dropout)


class UNet(nn.Module):
    """[N, inputs, H, W] to logits [N, outputs, H, W]; H and W are multiples of 4."""

    def __init__(self, inputs: int, outputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.down1 = _block(inputs, width)
        self.down2 = _block(width, 2 * width)
        self.bottom = _block(2 * width, 4 * width)
        self.up2 = _block(6 * width, 2 * width)
        self.up1 = _block(3 * width, width)
        self.drop_bottom: nn.Module = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.drop_up: nn.Module = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        middle = self.down2(F.max_pool2d(fine, 2))
        h = self.drop_bottom(self.bottom(F.max_pool2d(middle, 2)))
        h = self.drop_up(self.up2(torch.cat([_doubled(h), middle], -3)))
        return self.head(self.up1(torch.cat([_doubled(h), fine], -3)))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")
