"""Shifts do what their names say, and nothing at level zero."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from doxa.errors import DataError, MethodError, ShapeError
from doxa.evaluate.shifts import SEVERITIES, SHIFTS, corrupted, shifted


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Smooth random images, off centre and not symmetric."""
    noise = np.random.default_rng(0).uniform(size=(6, 3, 20, 20))
    smooth = ndimage.gaussian_filter(noise, (0, 0, 1.5, 1.5))
    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min())
    return torch.tensor(smooth, dtype=torch.float32)


@pytest.mark.parametrize("quarter", [1, 2, 3])
def test_right_angles_are_those_of_rot90(images: Tensor, quarter: int) -> None:
    expected = torch.rot90(images, quarter, (2, 3))
    torch.testing.assert_close(
        shifted(images, "rotation", 90.0 * quarter), expected, atol=1e-5, rtol=0
    )
    back = shifted(images, "rotation", 90.0 * (quarter - 4))
    torch.testing.assert_close(back, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("degrees", [17.0, 45.0, 130.0])
def test_rotation_as_in_scipy(images: Tensor, degrees: float) -> None:
    expected = ndimage.rotate(
        images.numpy(), degrees, axes=(3, 2), reshape=False, order=1, mode="grid-constant", cval=0.0
    )
    got = shifted(images, "rotation", degrees)
    assert np.abs(got.numpy() - expected).max() < 1e-4


def test_a_half_turn_of_an_oblong_image_is_a_flip(images: Tensor) -> None:
    oblong = images[:, :, :13]
    torch.testing.assert_close(
        shifted(oblong, "rotation", 180.0), oblong.flip(2, 3), atol=1e-5, rtol=0
    )


def test_translation_moves_right_and_down_and_fills_with_black(images: Tensor) -> None:
    moved = shifted(images, "translation", 0.1)  # two of twenty pixels
    torch.testing.assert_close(moved[:, :, 2:, 2:], images[:, :, :-2, :-2], atol=1e-5, rtol=0)
    assert moved[:, :, :2].abs().max() < 1e-6 and moved[:, :, :, :2].abs().max() < 1e-6


def test_blur_as_in_scipy(images: Tensor) -> None:
    expected = ndimage.gaussian_filter(
        images.double().numpy(), (0, 0, 1.5, 1.5), mode="nearest", truncate=5 / 1.5
    )
    np.testing.assert_allclose(shifted(images, "blur", 1.5).numpy(), expected, atol=1e-6)


def test_contrast_keeps_the_mean_and_scales_the_spread(images: Tensor) -> None:
    flat = shifted(images, "contrast", 0.8)
    torch.testing.assert_close(flat.mean((1, 2, 3)), images.mean((1, 2, 3)))
    torch.testing.assert_close(flat.std((1, 2, 3)), 0.2 * images.std((1, 2, 3)))


def test_brightness_adds_and_saturates(images: Tensor) -> None:
    torch.testing.assert_close(shifted(images, "brightness", 0.3), (images + 0.3).clamp(max=1.0))


def test_pixelate_shows_blocks_of_means() -> None:
    ramp = torch.arange(16.0).reshape(1, 1, 4, 4) / 15
    got = shifted(ramp, "pixelate", 0.5)
    means = ramp.reshape(2, 2, 2, 2).mean((1, 3))
    torch.testing.assert_close(got[0, 0], means.repeat_interleave(2, 0).repeat_interleave(2, 1))


def test_gaussian_noise_has_its_standard_deviation() -> None:
    grey = torch.full((4, 1, 100, 100), 0.5)
    noise = shifted(grey, "gaussian_noise", 0.1) - grey
    # 40,000 values: the standard error of the std is 0.1 / sqrt(80,000); five of them
    assert abs(noise.std() - 0.1) < 5 * 0.1 / math.sqrt(80_000)
    assert abs(noise.mean()) < 5 * 0.1 / 200


def test_shot_noise_counts() -> None:
    level, grey = 0.05, torch.full((4, 1, 100, 100), 0.3)
    seen = shifted(grey, "shot_noise", level)
    counts = seen / level
    assert torch.allclose(counts, counts.round(), atol=1e-4)
    # Poisson(6) in counts of 0.05: variance 0.05 × 0.3; its relative standard error is 0.8 %
    assert abs(seen.var() / (level * 0.3) - 1) < 0.04
    assert abs(seen.mean() - 0.3) < 5 * math.sqrt(level * 0.3 / 40_000)


def test_occlusion_blackens_its_share_in_different_places() -> None:
    white = torch.ones(40, 2, 30, 20)
    seen = shifted(white, "occlusion", 0.25)
    covered = (seen == 0).double().mean((1, 2, 3))
    assert (covered - 0.25).abs().max() < 0.04
    assert torch.equal(seen[:, 0], seen[:, 1])
    assert len({tuple(image.flatten().tolist()) for image in seen[:, 0]}) > 30


@pytest.mark.parametrize("shift", SHIFTS)
def test_level_zero_is_the_identity_and_severities_grow(images: Tensor, shift: str) -> None:
    assert torch.equal(corrupted(images, shift, 0), images)
    before = images.clone()
    away = [float((corrupted(images, shift, s) - images).square().mean()) for s in range(1, 6)]
    assert torch.equal(images, before)
    assert min(away) > 0
    if shift == "pixelate":  # blocks that do not line up may lie further off than larger ones
        away = [-float(len(corrupted(images, shift, s)[0, 0].unique())) for s in range(1, 6)]
    if shift != "rotation":  # a random image is as far from itself at 45 degrees as at 90
        assert all(b > a for a, b in itertools.pairwise(away))
    for severity in range(1, 6):
        got = corrupted(images, shift, severity)
        assert got.shape == images.shape and got.dtype == images.dtype
        assert float(got.min()) >= -1e-6 and float(got.max()) <= 1 + 1e-6


@pytest.mark.parametrize("shift", ["gaussian_noise", "shot_noise", "occlusion"])
def test_a_seed_fixes_the_noise_and_another_changes_it(images: Tensor, shift: str) -> None:
    level = SEVERITIES[shift][4]
    first = shifted(images, shift, level, seed=1)
    torch.rand(3)  # whatever else draws in between
    assert torch.equal(shifted(images, shift, level, seed=1), first)
    assert not torch.equal(shifted(images, shift, level, seed=2), first)


def test_double_precision_stays() -> None:
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert all(corrupted(x, shift, 3).dtype == torch.float64 for shift in SHIFTS)


def test_bad_images_and_levels_are_refused(images: Tensor) -> None:
    with pytest.raises(DataError, match="between 0 and 1"):
        shifted(images * 255, "blur", 1.0)
    with pytest.raises(DataError, match="between 0 and 1"):
        shifted(images * math.nan, "blur", 1.0)
    with pytest.raises(ShapeError, match=r"\[N, C, H, W\]"):
        shifted(images[0], "blur", 1.0)
    with pytest.raises(MethodError, match="did you mean 'rotation'"):
        shifted(images, "rotate", 1.0)
    with pytest.raises(MethodError, match="unknown shift"):
        corrupted(images, "fog", 1)
    with pytest.raises(MethodError, match="not negative"):
        shifted(images, "blur", -1.0)
    with pytest.raises(MethodError, match="a share"):
        shifted(images, "occlusion", 1.5)
    with pytest.raises(MethodError, match="0 to 5"):
        corrupted(images, "blur", 6)
