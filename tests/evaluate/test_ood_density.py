"""Feature densities equal numpy, scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.neighbors import NearestNeighbors

from doxa.errors import DataError, MethodError, ShapeError
from doxa.evaluate import ood
from doxa.evaluate.ood import FeatureDensity

RIDGE = 1e-9


@pytest.fixture(scope="module")
def clouds() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three correlated clouds of unequal size, labelled 2, 5 and 9, and points to judge."""
    rng = np.random.default_rng(3)
    sizes, labels = (40, 90, 60), (2, 5, 9)
    parts = [
        rng.normal(size=(n, 4)) @ rng.normal(size=(4, 4)) + 4 * rng.normal(size=4) for n in sizes
    ]
    order = rng.permutation(sum(sizes))
    z, y = np.concatenate(parts)[order], np.repeat(labels, sizes)[order]
    return z, y, 5 * rng.normal(size=(25, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mahalanobis_is_the_distance_to_the_nearest_class(clouds, dtype) -> None:
    z, y, new = clouds
    if dtype == torch.float32:
        z, new = z.astype(np.float32).astype(float), new.astype(np.float32).astype(float)
    means = {c: z[y == c].mean(0) for c in np.unique(y)}
    away = np.stack([row - means[c] for row, c in zip(z, y, strict=True)])
    precision = np.linalg.inv(away.T @ away / len(z))
    expected = [min((row - m) @ precision @ (row - m) for m in means.values()) for row in new]
    density = FeatureDensity(torch.tensor(z, dtype=dtype), torch.tensor(y), ridge=RIDGE)
    got = density.mahalanobis(torch.tensor(new, dtype=dtype))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


def test_density_is_a_mixture_of_class_normals(clouds) -> None:
    z, y, new = clouds
    mixture = sum(
        (y == c).mean()
        * multivariate_normal(z[y == c].mean(0), np.cov(z[y == c].T, bias=True)).pdf(new)
        for c in np.unique(y)
    )
    got = FeatureDensity(z, y, ridge=RIDGE).density(new)
    np.testing.assert_allclose(got.numpy(), -np.log(mixture), rtol=1e-6)


def test_without_labels_there_is_one_gaussian(clouds) -> None:
    z, _, new = clouds
    one = multivariate_normal(z.mean(0), np.cov(z.T, bias=True))
    density = FeatureDensity(z, ridge=RIDGE)
    np.testing.assert_allclose(density.density(new).numpy(), -one.logpdf(new), rtol=1e-6)
    constant = np.log(np.linalg.det(2 * np.pi * np.cov(z.T, bias=True)))
    np.testing.assert_allclose(
        density.mahalanobis(new).numpy(), -2 * one.logpdf(new) - constant, rtol=1e-6
    )


@pytest.mark.parametrize("k", [1, 7, 190])
def test_knn_as_in_scikit_learn(clouds, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z, y, new = clouds
    unit = lambda a: a / np.linalg.norm(a, axis=1, keepdims=True)  # noqa: E731
    distances, _ = NearestNeighbors(n_neighbors=k).fit(unit(z)).kneighbors(unit(new))
    density = FeatureDensity(z, y, k=k)
    np.testing.assert_allclose(density.knn(new).numpy(), distances[:, -1], atol=1e-7)
    monkeypatch.setattr(ood, "_CHUNK_BYTES", 8 * 190 * 3)  # three rows at a time
    np.testing.assert_allclose(density.knn(new).numpy(), distances[:, -1], atol=1e-7)


def test_mahalanobis_and_density_do_not_see_a_change_of_units(clouds) -> None:
    z, y, new = clouds
    scale = np.array([[1.0, 3.0, 0.2, 10.0]])
    plain, scaled = FeatureDensity(z, y, ridge=RIDGE), FeatureDensity(z * scale, y, ridge=RIDGE)
    first, second = plain.mahalanobis(new), scaled.mahalanobis(new * scale)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=0)
    moved = scaled.density(new * scale) - plain.density(new)
    torch.testing.assert_close(
        moved, torch.full_like(moved, np.log(scale).sum()), rtol=1e-3, atol=0
    )


def test_dead_units_do_not_break_it_and_waking_one_is_strange(clouds) -> None:
    z, y, _ = clouds
    dead = np.concatenate([z, np.zeros((len(z), 1))], 1)
    density = FeatureDensity(dead, y)
    awake = dead[:1].copy()
    awake[0, -1] = 1.0
    assert density.mahalanobis(awake) > 100 * density.mahalanobis(dead).max()
    assert torch.isfinite(density.density(dead)).all()


def test_places_are_averaged() -> None:
    maps = torch.randn(30, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    density = FeatureDensity(maps)
    torch.testing.assert_close(
        density.mahalanobis(maps), FeatureDensity(maps.mean((2, 3))).mahalanobis(maps.mean((2, 3)))
    )


def test_bad_features_are_refused(clouds) -> None:
    z, y, new = clouds
    with pytest.raises(DataError, match="same features"):
        FeatureDensity(np.ones((5, 2)))
    with pytest.raises(DataError, match="k = 191 neighbours"):
        FeatureDensity(z, k=191)
    with pytest.raises(MethodError, match="k must be"):
        FeatureDensity(z, k=0)
    with pytest.raises(ShapeError, match="labels for 190 rows"):
        FeatureDensity(z, y[:-1])
    with pytest.raises(ShapeError, match="width 3"):
        FeatureDensity(z, y).knn(new[:, :3])
    with pytest.raises(DataError, match="row 4 are not finite"):
        broken = new.copy()
        broken[4, 1] = np.nan
        FeatureDensity(z, y).density(broken)
    with pytest.raises(ShapeError, match="at least one row"):
        FeatureDensity(np.zeros((0, 3)))
