"""On a GPU, recalibrated and conformal predictions stay there and equal the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from given_posterior import GivenPosterior
from torch import Tensor

from doxa.evaluate.conformal import conformal
from doxa.evaluate.recalibrate import recalibrate
from doxa.likelihoods import HeteroscedasticGaussian

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CLASSES = GivenPosterior("categorical")
NUMBERS = GivenPosterior(HeteroscedasticGaussian())


def compare(made: Any, x: Tensor, y: Tensor, names: list[str], call: str | None) -> None:
    """The same transform, fitted and asked on either device."""
    answers = []
    for device in ("cpu", "cuda"):
        p = made((x.to(device), y.to(device))).predict(x.to(device))
        values = [getattr(p, name) for name in names] + [p.log_prob(y.to(device))]
        if call is not None:
            got = getattr(p, call)()
            values += list(got) if isinstance(got, tuple) else [got]
        assert all(v.device.type == device for v in values)
        answers.append([v.cpu() for v in values])
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["temperature", "vector", "dirichlet", "isotonic", "histogram"])
def test_recalibrated_classes(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = 2.0 * torch.randn(300, 3, 4, generator=g, dtype=torch.float64)
    y = torch.multinomial(torch.softmax(x, 2).mean(1), 1, generator=g).squeeze(1)
    names = ["probs", "entropy", "mutual_information", "epistemic"]
    compare(lambda data: recalibrate(CLASSES, data, kind), x, y, names, "prediction_set")


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "lac"},
        {"kind": "aps"},
        {"kind": "mondrian"},
        {"kind": "mondrian", "groups": lambda x: (x[:, 0, 0] > 0).long()},
    ],
)
def test_conformal_sets(options: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    x = 2.0 * torch.randn(300, 3, 4, generator=g, dtype=torch.float64)
    y = torch.multinomial(torch.softmax(x, 2).mean(1), 1, generator=g).squeeze(1)
    compare(lambda d: conformal(CLASSES, d, 0.8, **options), x, y, ["probs"], "prediction_set")


@pytest.mark.parametrize("kind", ["variance", "quantile", "split", "cqr"])
def test_numbers(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, 2, generator=g, dtype=torch.float64)
    y = x[:, :, :1].mean(1) + torch.randn(100, 1, generator=g, dtype=torch.float64)

    def made(data: Any) -> Any:
        if kind in ("variance", "quantile"):
            return recalibrate(NUMBERS, data, kind)
        return conformal(NUMBERS, data, 0.9, kind)

    compare(made, x, y, ["mean", "std", "epistemic"], "interval")
