"""The same numbers as torchmetrics 1.9; made by `peer_metrics.py`.

torchmetrics sums in float32, hence 1e-6. It gives 0 to a class without true pixels where there is
no accuracy here, and its CRPS is the plain one of the draws.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doxa.evaluate.calibration import ece, reliability
from doxa.evaluate.pixels import segmentation
from doxa.evaluate.scores import accuracy, confusion, crps_draws, mae, rmse, top_k_accuracy
from doxa.likelihoods import Gaussian
from doxa.predictive import Predictive

HERE = Path(__file__)
_SPEC = importlib.util.spec_from_file_location("peer_metrics", HERE.with_name("peer_metrics.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
peer: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(peer)
PEER = json.loads(HERE.with_name("peer_metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", peer.CASES)
def test_classes(case: str) -> None:
    probs, label = peer.table(case)
    p, theirs = Predictive.from_probs(probs), PEER[case]
    assert accuracy(p, label) == pytest.approx(theirs["accuracy"], abs=1e-6)
    assert ece(p, label) == pytest.approx(theirs["ece"], abs=1e-6)
    assert confusion(p, label).tolist() == theirs["confusion"]
    assert top_k_accuracy(p, label, 2) == pytest.approx(theirs["top 2"], abs=1e-6)
    one = reliability(p, label, 15, of_class=1)
    gap = ((one.accuracy - one.confidence).abs() * one.count).nansum() / one.count.sum()
    assert float(gap) == pytest.approx(theirs["class 1"], abs=1e-6)


def test_label_maps() -> None:
    predicted, truth = peer.maps()
    found, theirs = segmentation(predicted, truth, peer.CLASSES, 255), PEER["segmentation"]
    assert found.confusion.tolist() == theirs["confusion"]
    assert np.allclose(found.iou, theirs["iou"], atol=1e-6)
    assert found.pixel_accuracy == pytest.approx(theirs["pixel accuracy"], abs=1e-6)
    assert np.allclose(found.class_accuracy[:3], theirs["class accuracy"][:3], atol=1e-6)
    assert torch.isnan(found.class_accuracy[3])


def test_numbers() -> None:
    draws, y = peer.ensemble()
    p, theirs = Predictive(draws.unsqueeze(-1), Gaussian(noise=1.0)), PEER["numbers"]
    assert rmse(p, y) == pytest.approx(theirs["rmse"], abs=1e-6)
    assert mae(p, y) == pytest.approx(theirs["mae"], abs=1e-6)
    assert float(crps_draws(draws, y).mean()) == pytest.approx(theirs["crps"], abs=1e-6)
