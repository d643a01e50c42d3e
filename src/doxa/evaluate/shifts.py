"""Shifted images: corruptions of a known level, and the scores of a posterior at each level.

Every shift takes images [N, C, H, W] with values from 0 to 1 and a level; level 0 is the original
image. Pixels from outside the image are black. Each shift has five fixed severities, similar to
those of Hendrycks & Dietterich (2019) but not the same. The same seed gives the same noise at every
level, so a sweep changes only the level. A sweep shows whether uncertainty grows as the images
move away from the training data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from doxa.errors import DataError, MethodError, ShapeError, did_you_mean
from doxa.evaluate.streaming import metrics
from doxa.noise import generator
from doxa.posterior import Posterior
from doxa.predictive import Predictive

Shift = Callable[[Tensor, float, Generator], Tensor]


def rotation(x: Tensor, degrees: float) -> Tensor:
    """Turned counter-clockwise about the centre, bilinear."""
    turn = math.radians(degrees % 360.0)
    cos, sin = round(math.cos(turn), 15), round(math.sin(turn), 15)  # a right angle is exact
    return _resample(x, ((cos, -sin), (sin, cos)), (0.0, 0.0))


def translation(x: Tensor, share: float) -> Tensor:
    """Moved right and down by a share of the width and of the height, bilinear."""
    return _resample(x, ((1.0, 0.0), (0.0, 1.0)), (share * x.shape[3], share * x.shape[2]))


def gaussian_noise(x: Tensor, std: float, source: Generator) -> Tensor:
    """Independent normal noise of this standard deviation on every value."""
    noise = torch.randn(x.shape, generator=source, dtype=torch.float32)
    return (x + std * noise.to(x)).clamp(0.0, 1.0)


def shot_noise(x: Tensor, level: float, source: Generator) -> Tensor:
    """Counting noise: each value v becomes level · Poisson(v / level), with variance level · v."""
    seen = torch.poisson(x.detach().float().cpu() / level, generator=source) * level
    return seen.to(x).clamp(0.0, 1.0)


def blur(x: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur of `sigma` pixels; the border repeats its last pixel."""
    radius = max(1, math.ceil(3.0 * sigma))
    place = torch.arange(-radius, radius + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (place / sigma).square())
    kernel = (kernel / kernel.sum()).to(x)
    flat = x.flatten(0, 1).unsqueeze(1)  # [N C, 1, H, W]
    flat = F.conv2d(F.pad(flat, (radius, radius, 0, 0), "replicate"), kernel.view(1, 1, 1, -1))
    flat = F.conv2d(F.pad(flat, (0, 0, radius, radius), "replicate"), kernel.view(1, 1, -1, 1))
    return flat.view_as(x)


def contrast(x: Tensor, lost: float) -> Tensor:
    """Each image drawn towards its own mean by this share; 1 leaves a flat image."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return x + lost * (mean - x)


def brightness(x: Tensor, added: float) -> Tensor:
    """A constant added to every value."""
    return (x + added).clamp(0.0, 1.0)


def pixelate(x: Tensor, lost: float) -> Tensor:
    """Fewer pixels: width and height fall by this share, and each is shown as a block."""
    height, width = (max(1, round((1.0 - lost) * size)) for size in x.shape[2:])
    small = F.adaptive_avg_pool2d(x, (height, width))
    return F.interpolate(small, size=tuple(x.shape[2:]), mode="nearest")


def occlusion(x: Tensor, share: float, source: Generator) -> Tensor:
    """A black rectangle of the image's own shape over a share of its area, somewhere."""
    place = torch.rand((2, x.shape[0], 1), generator=source).to(x)
    covered = []
    for axis, size in enumerate(x.shape[2:]):
        side = math.sqrt(share) * size
        start = place[axis] * (size - side)
        pixel = torch.arange(size, device=x.device, dtype=x.dtype) + 0.5
        covered.append((pixel >= start) & (pixel < start + side))
    rows, columns = covered
    return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


_QUIET: dict[str, Callable[[Tensor, float], Tensor]] = {
    "rotation": rotation,
    "translation": translation,
    "blur": blur,
    "contrast": contrast,
    "brightness": brightness,
    "pixelate": pixelate,
}
_NOISY: dict[str, Shift] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "occlusion": occlusion,
}
SHIFTS = (*_QUIET, *_NOISY)
_PROPORTIONS = ("translation", "contrast", "pixelate", "occlusion")

SEVERITIES: dict[str, tuple[float, float, float, float, float]] = {
    "rotation": (15.0, 30.0, 45.0, 60.0, 90.0),  # degrees
    "translation": (0.05, 0.1, 0.15, 0.2, 0.3),  # of the side
    "gaussian_noise": (0.05, 0.1, 0.2, 0.3, 0.5),  # standard deviation
    "shot_noise": (0.01, 0.03, 0.1, 0.2, 0.5),  # the size of one count
    "blur": (0.5, 0.75, 1.0, 1.5, 2.0),  # pixels
    "contrast": (0.25, 0.5, 0.65, 0.8, 0.9),  # lost
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),  # added
    "pixelate": (0.2, 0.4, 0.5, 0.6, 0.75),  # of the side lost
    "occlusion": (0.05, 0.1, 0.2, 0.3, 0.5),  # of the area
}


def shifted(x: Tensor, shift: str, level: float, seed: int = 0) -> Tensor:
    """Images under a named shift at a level in its own units (see `SEVERITIES`); 0 changes nothing.

    Parameters
    ----------
    x: [N, C, H, W], values from 0 to 1. shift: one of `SHIFTS`.
    seed: of the noise; the same at every level.
    """
    _check(x)
    if shift not in SHIFTS:
        raise MethodError(f"unknown shift {shift!r}{did_you_mean(shift, SHIFTS)}")
    if not math.isfinite(level) or (level < 0.0 and shift not in ("rotation", "translation")):
        raise MethodError(f"the level of {shift} must be finite and not negative, not {level}")
    if shift in _PROPORTIONS and abs(level) > 1.0:
        raise MethodError(f"the level of {shift} is a share, at most 1, not {level}")
    if level == 0.0 or (shift == "rotation" and level % 360.0 == 0.0):
        return x.clone()
    if shift in _QUIET:
        return _QUIET[shift](x, level)
    return _NOISY[shift](x, level, generator("shift", shift, seed))


def corrupted(x: Tensor, shift: str, severity: int, seed: int = 0) -> Tensor:
    """Images under a named shift at severity 1 to 5; 0 changes nothing."""
    if severity not in range(6):
        raise MethodError(f"severity goes from 0 to 5, not {severity!r}")
    known = SEVERITIES.get(shift, (0.0,) * 5)  # an unknown name is refused below
    return shifted(x, shift, (0.0, *known)[severity], seed)


def _check(x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point() or x.numel() == 0:
        what = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"images must be a float tensor [N, C, H, W], got {what}")
    low, high = x.aminmax()
    if not (float(low) >= 0.0 and float(high) <= 1.0):
        raise DataError(
            f"images must lie between 0 and 1, these go from {float(low):.3g} to {float(high):.3g};"
            " shift first and standardise afterwards"
        )


def _resample(x: Tensor, turn: tuple[tuple[float, ...], ...], moved: tuple[float, float]) -> Tensor:
    """Each pixel (column, row), seen from the centre, takes its value from turn · (it − moved)."""
    height, width = x.shape[2:]
    rows, columns = torch.meshgrid(
        torch.arange(height, device=x.device, dtype=torch.float64) - 0.5 * (height - 1) - moved[1],
        torch.arange(width, device=x.device, dtype=torch.float64) - 0.5 * (width - 1) - moved[0],
        indexing="ij",
    )
    across = turn[0][0] * columns + turn[0][1] * rows
    down = turn[1][0] * columns + turn[1][1] * rows
    grid = torch.stack([across / (0.5 * width), down / (0.5 * height)], -1).to(x.dtype)
    grid = grid.expand(x.shape[0], height, width, 2)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def sweep(
    posterior: Posterior,
    x: Tensor,
    y: Any,
    shift: str | Callable[[Tensor, float], Tensor],
    levels: Sequence[float] | None = None,
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    n: int | None = None,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Metrics and uncertainty of a posterior at each level of a shift, one row per level.

    Parameters
    ----------
    posterior : Posterior
        The posterior that predicts.
    x : Tensor
        Test images [N, C, H, W] with values from 0 to 1; any inputs for a function as shift.
    y : array_like
        Targets.
    shift : str or callable
        A name from `shifts.SHIFTS`, or a function of (x, level).
    levels : sequence of float, optional
        Levels in the units of the shift. The default for a named shift is 0 and its five
        severities.
    prepare : callable, optional
        Maps shifted images to the inputs of the network (for example standardisation).
    n : int, optional
        Number of samples per prediction.
    seed : int, default 0
        Seed of the noise of the shift.

    Returns
    -------
    list of dict
        Rows {"level", metrics of `doxa.evaluate.metrics`, "entropy", "mutual_information"}; for
        regression "epistemic" and "aleatoric" (mean variances) in place of the last two.
    """
    if levels is None:
        if not isinstance(shift, str):
            raise DataError("a shift of your own has no severities here: give its levels")
        levels = [0.0, *SEVERITIES.get(shift, ())]
    if len(levels) == 0:
        raise DataError("levels is empty: a sweep needs at least one")
    table = []
    for level in levels:
        level = float(level)
        moved = shifted(x, shift, level, seed) if isinstance(shift, str) else shift(x, level)
        with torch.no_grad():
            p = posterior.predict(moved if prepare is None else prepare(moved), n)
        parts = _uncertainty(p)
        uncertainty = {name: float(values.double().mean()) for name, values in parts.items()}
        table.append({"level": level, **metrics(p, y), **uncertainty})
    return table


def _uncertainty(p: Predictive) -> dict[str, Tensor]:
    """The uncertainties of a predictive by name, those that it has."""
    if p.classifies:
        information = {"mutual_information": p.mutual_information} if p.splits else {}
        return {"entropy": p.entropy, **information}
    return {"epistemic": p.epistemic, "aleatoric": p.aleatoric} if p.splits else {}
