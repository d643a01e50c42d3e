"""The same numbers as laplace-torch 0.3 at the same weights; made by `peer_numbers.py`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import doxa
from doxa.linalg import KroneckerBlock

_SPEC = importlib.util.spec_from_file_location(
    "peer_numbers", Path(__file__).with_name("peer_numbers.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
peer: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(peer)

# log marginal likelihood; mean and covariance of f at two rows; fingerprints of Kronecker factors
PEER: dict[str, list[Any]] = json.loads(
    Path(__file__).with_name("peer_numbers.json").read_text(encoding="utf-8")
)
STRUCTURE = {"full": "full", "diag": "diagonal", "kron": "kronecker"}


def fitted(case: str) -> tuple[Any, torch.Tensor]:
    """The posterior of one case, and the rows that are predicted."""
    task, structure, curvature = case.split()
    pictures = (peer.images(), torch.arange(12) % 3)
    net, data, x = {
        "regression": lambda: (peer.net(2), peer.regression(), peer.inputs(3)[1:]),
        "classification": lambda: (peer.net(3), peer.classification(), peer.inputs(3)[1:]),
        "images": lambda: (peer.image_net(), pictures, peer.images(3)[1:]),
    }[task]()
    likelihood = doxa.Gaussian(peer.NOISE) if task == "regression" else doxa.Categorical()
    model = doxa.Model(net, likelihood, doxa.Normal(peer.PRIOR_PRECISION**-0.5))
    method = doxa.Laplace(
        STRUCTURE[structure], curvature=curvature, train=False, mean_correction=False
    )
    return doxa.fit(model, data, method, init="given", batch_size=5), x


@pytest.mark.parametrize("case", PEER)
def test_equal_to_laplace_torch(case: str) -> None:
    """Evidence to 1e-8 and covariances to 1e-7 (its full matrix of images, made by products with
    unit vectors, is symmetric to 1e-9 only); what has factors, to 1e-9. Its evidence takes the
    weights for a maximum, and lacks λ²/2."""
    evidence, mean, covariance, *factors = PEER[case]
    posterior, x = fitted(case)
    above = 0.5 * posterior.diagnostics["newton_decrement"][0] ** 2
    assert posterior.log_evidence - above == pytest.approx(evidence, rel=1e-8)
    f, spread = posterior.jacobians().spread(x, posterior.covariance)
    assert np.allclose(f[0], mean, rtol=1e-12)
    assert np.allclose(spread[0], covariance, rtol=1e-7)
    variance = torch.tensor(covariance).diagonal(dim1=-2, dim2=-1)
    if case.startswith("regression"):
        p = posterior.predict(x)
        assert np.allclose(p.epistemic, variance, rtol=1e-8)
        assert np.allclose(p.aleatoric, peer.NOISE**2)
    if factors:
        noise = peer.NOISE**2 if case.startswith("regression") else 1.0  # apart from its factors
        for block, theirs in zip(posterior.covariance.blocks, factors[0], strict=True):
            ours = noise * np.array(fingerprint(block))
            assert np.allclose(ours, np.prod(theirs, axis=0), rtol=1e-9)


def fingerprint(block: KroneckerBlock) -> tuple[float, float]:
    """That of B ⊗ A, the product of its factors' ones: its trace, and (u ⊗ v)ᵀ (B ⊗ A) (u ⊗ v)."""
    size = block.left.shape[-1]
    u, v = (torch.cos(torch.arange(n, dtype=torch.float64)) for n in (size, block.size // size))
    turned = block.to_eigenbasis(torch.outer(u, v).reshape(1, 1, -1))[0, 0]
    return float(block.curvature.sum()), float((block.curvature[0] * turned.square()).sum())


LINKS = {
    "probit-marginal": [
        [0.5759223569244999, 0.2741289447278408, 0.14994869834765936],
        [0.5700527213827211, 0.2776987582320241, 0.1522485203852549],
    ],
    "bridge": [
        [0.5097089428532898, 0.3267026588456947, 0.1635883983010154],
        [0.5240136930330658, 0.3071293486613051, 0.16885695830562916],
    ],
}


@pytest.mark.parametrize("link", LINKS)
def test_the_same_class_probabilities(link: str) -> None:
    model = doxa.Model(peer.net(3), doxa.Categorical(), doxa.Normal(peer.PRIOR_PRECISION**-0.5))
    method = doxa.Laplace(link=link, train=False, mean_correction=False)
    posterior = doxa.fit(model, peer.classification(), method, init="given")
    assert np.allclose(posterior.predict(peer.inputs(3)[1:]).probs, LINKS[link], rtol=1e-8)
