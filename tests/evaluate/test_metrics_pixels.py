"""Segmentation against scikit-learn's Jaccard, recall and confusion matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from metric_cases import randn
from sklearn.metrics import confusion_matrix, jaccard_score, recall_score

from doxa.errors import DataError, ShapeError
from doxa.evaluate.pixels import segmentation
from doxa.likelihoods import Bernoulli, Categorical
from doxa.predictive import Predictive

C = 5


def maps(seed: int = 0, absent: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true label maps [3, 6, 7] that agree at about half the pixels."""
    source = np.random.default_rng(seed)
    known = [c for c in range(C) if c not in absent]
    truth = source.choice(known, size=(3, 6, 7))
    guess = source.choice(known, size=(3, 6, 7))
    return np.where(source.uniform(size=truth.shape) < 0.4, truth, guess), truth


@pytest.mark.parametrize("ignored", [None, 255, 0])
def test_equal_to_scikit_learn(ignored: int | None) -> None:
    predicted, truth = maps()
    if ignored == 255:
        truth = np.where(np.random.default_rng(9).uniform(size=truth.shape) < 0.2, 255, truth)
    found = segmentation(torch.as_tensor(predicted), truth, C, ignored)
    counted = truth != ignored
    t, g = truth[counted], predicted[counted]
    assert np.array_equal(found.confusion, confusion_matrix(t, g, labels=range(C)))
    scored = [c for c in range(C) if c != ignored]
    iou = jaccard_score(t, g, labels=scored, average=None)
    recall = recall_score(t, g, labels=scored, average=None)
    assert np.allclose(found.iou[scored], iou)
    assert np.allclose(found.class_accuracy[scored], recall)
    assert found.mean_iou == pytest.approx(iou.mean())
    assert found.mean_class_accuracy == pytest.approx(recall.mean())
    assert found.pixel_accuracy == pytest.approx((t == g).mean())
    weighted = jaccard_score(t, g, labels=scored, average="weighted")
    assert found.frequency_weighted_iou == pytest.approx(weighted)
    if ignored == 0:
        assert torch.isnan(found.iou[0])


def test_absent_classes() -> None:
    """Neither true nor predicted: NaN, out of the mean. Predicted only: IoU 0, no accuracy."""
    predicted, truth = maps(absent=(1, 4))
    predicted[0, 0, 0] = 4
    found = segmentation(torch.as_tensor(predicted), truth, C)
    assert torch.isnan(found.iou).tolist() == [False, True, False, False, False]
    assert float(found.iou[4]) == 0.0
    assert torch.isnan(found.class_accuracy).tolist() == [False, True, False, False, True]
    iou = jaccard_score(truth.ravel(), predicted.ravel(), labels=[0, 2, 3, 4], average=None)
    assert found.mean_iou == pytest.approx(iou.mean())


def test_perfect_worst_and_one_class_only() -> None:
    _, truth = maps()
    perfect = segmentation(torch.as_tensor(truth), truth, C)
    assert perfect.pixel_accuracy == perfect.mean_iou == perfect.mean_class_accuracy == 1.0
    assert perfect.frequency_weighted_iou == pytest.approx(1.0)
    worst = segmentation(torch.as_tensor((truth + 1) % C), truth, C)
    assert worst.pixel_accuracy == worst.mean_iou == worst.mean_class_accuracy == 0.0
    single = segmentation(torch.zeros(2, 3), torch.zeros(2, 3), 2)
    assert single.mean_iou == single.pixel_accuracy == single.mean_class_accuracy == 1.0


def test_a_predictive_brings_its_labels_classes_and_ignored_index() -> None:
    f = randn(3, 2, C, 4, 4)
    y = torch.randint(C, (2, 4, 4), generator=torch.Generator().manual_seed(0))
    y[0, 0] = 255
    p = Predictive(f, Categorical(ignore_index=255))
    found = segmentation(p, y)
    byhand = segmentation(p.probs.argmax(1), y, C, 255)
    assert torch.equal(found.confusion, byhand.confusion)
    assert int(found.confusion.sum()) == 28
    binary = Predictive(randn(1, 2, 4, 4), Bernoulli())
    mask = (randn(2, 4, 4, seed=1) > 0).long()
    two = segmentation(binary, mask)
    assert two.iou.tolist() == pytest.approx(
        jaccard_score(mask.flatten(), (binary.probs > 0.5).flatten(), average=None).tolist()
    )


def test_batches_add_up() -> None:
    predicted, truth = (torch.as_tensor(part) for part in maps())
    whole = segmentation(predicted, truth, C)
    parts = segmentation(predicted[:1], truth[:1], C) + segmentation(predicted[1:], truth[1:], C)
    assert torch.equal(whole.confusion, parts.confusion)
    assert whole.mean_iou == parts.mean_iou
    with pytest.raises(DataError, match="same classes"):
        whole + segmentation(predicted, truth, C, 0)


def test_names_of_classes_do_not_matter() -> None:
    predicted, truth = maps()
    names = np.random.default_rng(1).permutation(C)
    found = segmentation(torch.as_tensor(predicted), truth, C)
    renamed = segmentation(torch.as_tensor(names[predicted]), names[truth], C)
    assert torch.allclose(renamed.iou[names], found.iou)
    assert renamed.mean_iou == pytest.approx(found.mean_iou)


def test_what_cannot_be_scored() -> None:
    predicted, truth = (torch.as_tensor(part) for part in maps())
    with pytest.raises(DataError, match="no pixel to score"):
        segmentation(predicted, torch.full_like(truth, 255), C, 255)
    with pytest.raises(DataError, match="a true label is 255"):
        segmentation(predicted, torch.full_like(truth, 255), C)
    with pytest.raises(DataError, match="a predicted label is -5"):
        segmentation(predicted - 5, truth, C, ignore_index=3)
    with pytest.raises(ShapeError, match="do not fit"):
        segmentation(predicted[:1], truth, C)
    with pytest.raises(DataError, match="how many classes"):
        segmentation(predicted, truth)
    with pytest.raises(DataError, match="whole numbers"):
        segmentation(predicted, truth + 0.5, C)
    p = Predictive(torch.full((1, 1, 3, 2, 2), torch.nan), Categorical())
    with pytest.raises(DataError, match="is nan"):
        segmentation(p, torch.zeros(1, 2, 2))
    with pytest.raises(DataError, match="has 3 classes"):
        segmentation(Predictive(torch.zeros(1, 1, 3, 2, 2), Categorical()), truth, 4)
