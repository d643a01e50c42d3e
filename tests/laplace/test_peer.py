"""The same numbers as laplace-torch 0.3 at the same weights; made by `peer_numbers.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import doxa

_SPEC = importlib.util.spec_from_file_location(
    "peer_numbers", Path(__file__).with_name("peer_numbers.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
peer: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(peer)

# python tests/laplace/peer_numbers.py: log marginal likelihood; mean and covariance of f at 2 rows
PEER: dict[tuple[str, str], tuple[float, Any, Any]] = {
    ("regression", "full"): (
        -71.13252001254659,
        [[0.9762285463789953, 0.11914870670932964], [0.9703729751229545, 0.13830821768049129]],
        [
            [
                [0.05177930787789162, 0.004150572782804278],
                [0.00415057278280426, 0.05957499434105475],
            ],
            [
                [0.059429528028769885, 0.004790216914310066],
                [0.004790216914310087, 0.06344478522839693],
            ],
        ],
    ),
    ("regression", "diag"): (
        -85.72498506136134,
        [[0.9762285463789953, 0.11914870670932964], [0.9703729751229545, 0.13830821768049129]],
        [
            [
                [0.11607398265216567, 0.027960692906317496],
                [0.027960692906317496, 0.20672599281001053],
            ],
            [
                [0.11507363006678945, 0.029327629229168036],
                [0.029327629229168036, 0.19691913903754624],
            ],
        ],
    ),
    ("classification", "full"): (
        -22.846602682054638,
        [
            [0.9762285463789953, 0.11914870670932964, -0.6067502552708083],
            [0.9703729751229545, 0.13830821768049129, -0.5829415834068641],
        ],
        [
            [
                [0.8951248352573695, 0.6272572343597331, 0.36676260440389397],
                [0.6272572343597331, 1.2674329634198298, 0.606857239673774],
                [0.36676260440389397, 0.6068572396737739, 1.1157903040013926],
            ],
            [
                [0.9116467513422521, 0.6197489543681481, 0.40521156130281133],
                [0.619748954368148, 1.2343381478406394, 0.5678846738696004],
                [0.4052115613028113, 0.5678846738696004, 1.0944657741600552],
            ],
        ],
    ),
    ("classification", "diag"): (
        -24.489473316467706,
        [
            [0.9762285463789953, 0.11914870670932964, -0.6067502552708083],
            [0.9703729751229545, 0.13830821768049129, -0.5829415834068641],
        ],
        [
            [
                [0.9314315263609179, 0.2559168786867285, -0.06522603155415682],
                [0.2559168786867285, 1.495991742524783, 0.5303154100693009],
                [-0.06522603155415682, 0.5303154100693009, 1.2852258854267615],
            ],
            [
                [0.9486591212901552, 0.25723954473187166, -0.021689864239509957],
                [0.25723954473187166, 1.4781756017391612, 0.45492024375964074],
                [-0.021689864239509943, 0.45492024375964074, 1.2350867599279671],
            ],
        ],
    ),
}


@pytest.mark.parametrize("case", PEER, ids="-".join)
def test_equal_to_laplace_torch(case: tuple[str, str]) -> None:
    task, structure = case
    evidence, mean, covariance = PEER[case]
    regression = task == "regression"
    data = peer.regression() if regression else peer.classification()
    likelihood = doxa.Gaussian(noise=peer.NOISE) if regression else doxa.Categorical()
    model = doxa.Model(
        peer.net(2 if regression else 3), likelihood, doxa.Normal(peer.PRIOR_PRECISION**-0.5)
    )
    method = doxa.Laplace("diagonal" if structure == "diag" else "full", train=False)
    posterior = doxa.fit(model, data, method, init="given", batch_size=5)
    x = peer.inputs(3)[1:]
    f, jacobian = posterior._jacobians()(x)
    assert posterior.log_evidence == pytest.approx(evidence, rel=1e-10)
    assert np.allclose(f[0], mean, rtol=1e-12)
    assert np.allclose(posterior.covariance.outer(jacobian)[0], covariance, rtol=1e-8)
    if regression:
        p = posterior.predict(x)
        variance = torch.tensor(covariance).diagonal(dim1=-2, dim2=-1)
        assert np.allclose(p.epistemic, variance, rtol=1e-8)
        assert np.allclose(p.aleatoric, peer.NOISE**2)


LINKS = {
    "probit": [
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
    method = doxa.Laplace(link=link, train=False)
    posterior = doxa.fit(model, peer.classification(), method, init="given")
    assert np.allclose(posterior.predict(peer.inputs(3)[1:]).probs, LINKS[link], rtol=1e-8)
