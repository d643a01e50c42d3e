"""Numbers of torchmetrics for `test_metrics_peer.py`, on predictions from a formula.

pip install torchmetrics==1.9.0  # in an environment of its own, beside torch 2.13.0
python tests/evaluate/peer_metrics.py > tests/evaluate/peer_metrics.json
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

CLASSES = 4
CASES = ("plain", "ties", "one class only", "all wrong")


def wave(*shape: int, speed: float = 1.7, start: float = 0.0) -> Tensor:
    place = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    return torch.sin(speed * place + start) + 0.6 * torch.sin(0.37 * place * speed + 1.0)


def table(case: str) -> tuple[Tensor, Tensor]:
    """Probabilities [60, 4] and labels [60]; no confidence lies on an edge of 15 bins."""
    probs = torch.softmax(2.0 * wave(60, CLASSES), 1)
    label = (torch.arange(60) * 7 // 3) % CLASSES
    if case == "ties":
        probs = probs[torch.arange(60) % 5]
    elif case == "one class only":
        label = torch.full((60,), 2)
    elif case == "all wrong":
        label = (probs.argmax(1) + 1) % CLASSES
    return probs, label


def maps() -> tuple[Tensor, Tensor]:
    """Predicted and true label maps [2, 8, 9]; class 3 is never true, 255 is unlabelled."""
    predicted = (wave(2, 8, 9).abs() * 2.5).long().clamp_max(CLASSES - 1)
    truth = (wave(2, 8, 9, speed=1.7, start=0.4).abs() * 2.5).long().clamp_max(2)
    truth[0, 0] = 255
    return predicted, truth


def ensemble() -> tuple[Tensor, Tensor]:
    """Draws [7, 20] of numbers and what came true [20]."""
    return wave(7, 20, speed=2.3), wave(20, speed=0.9)


def main() -> None:
    from torchmetrics.functional import classification as c
    from torchmetrics.functional import regression as r

    found: dict[str, Any] = {}
    for case in CASES:
        probs, label = table(case)
        found[case] = {
            "accuracy": c.multiclass_accuracy(probs, label, CLASSES, average="micro").item(),
            "ece": c.multiclass_calibration_error(probs, label, CLASSES, n_bins=15).item(),
            "class 1": c.binary_calibration_error(
                probs[:, 1], (label == 1).long(), n_bins=15
            ).item(),
            "confusion": c.multiclass_confusion_matrix(probs, label, CLASSES).tolist(),
            "top 2": c.multiclass_accuracy(probs, label, CLASSES, average="micro", top_k=2).item(),
        }
    predicted, truth = maps()
    found["segmentation"] = {
        "confusion": c.multiclass_confusion_matrix(
            predicted, truth, CLASSES, ignore_index=255
        ).tolist(),
        "iou": c.multiclass_jaccard_index(
            predicted, truth, CLASSES, average="none", ignore_index=255
        ).tolist(),
        "pixel accuracy": c.multiclass_accuracy(
            predicted, truth, CLASSES, average="micro", ignore_index=255
        ).item(),
        "class accuracy": c.multiclass_accuracy(
            predicted, truth, CLASSES, average="none", ignore_index=255
        ).tolist(),
    }
    draws, y = ensemble()
    found["numbers"] = {
        "crps": r.continuous_ranked_probability_score(draws.T.contiguous(), y).item(),
        "rmse": r.mean_squared_error(draws.mean(0), y, squared=False).item(),
        "mae": r.mean_absolute_error(draws.mean(0), y).item(),
    }
    sys.stdout.write(json.dumps(found, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
