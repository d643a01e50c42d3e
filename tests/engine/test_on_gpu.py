"""On a GPU: steps of large networks are captured, and a capture that fails leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.engine.engine import choose_engine

on_gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def convolutions() -> nn.Sequential:
    """1.3 million weights, with statistics of the batch."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(4096, 310), nn.ReLU(), nn.Linear(310, 4),
    ).cuda()  # fmt: skip


def images() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(96, 3, 16, 16, generator=g).cuda(), torch.arange(96).cuda() % 4


def fit(net: nn.Module, method: Any = "map", **options: Any) -> doxa.Posterior:
    settings = {
        "likelihood": "categorical", "members": 2, "steps": 120, "batch_size": 32, "lr": 1e-3,
        "progress": False, "validation": None, "init": "given",
    } | options  # fmt: skip
    return doxa.fit(net, images(), method, **settings)


@on_gpu
@needs_gpu
def test_a_large_network_with_batch_norm_is_captured_and_has_the_same_numbers() -> None:
    captured = fit(convolutions())
    assert captured.diagnostics["mode"] == "graph"
    eager = fit(convolutions(), engine="loop:eager")
    for name, value in eager.tensors().items():
        torch.testing.assert_close(captured.tensors()[name], value, rtol=1e-3, atol=1e-4)


@on_gpu
@needs_gpu
def test_a_captured_large_network_resumes_bit_for_bit(tmp_path: Path) -> None:
    def press(step: int, _info: dict[str, Any]) -> None:
        if step >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(convolutions(), checkpoint=tmp_path, callbacks=[press])
    resumed, expected = fit(convolutions(), checkpoint=tmp_path), fit(convolutions())
    for name, value in expected.tensors().items():
        assert torch.equal(resumed.tensors()[name], value), name


class Waits(nn.Sequential):
    """Reads a value of the device in its forward pass: this cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.abs().max() > 0)


@on_gpu
@needs_gpu
def test_a_capture_that_fails_runs_eagerly_and_the_device_still_draws(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = Waits(*convolutions())
    found = fit(net, members=1, engine="loop:graph")
    assert found.diagnostics["mode"] == "eager" and "graph failed" in caplog.text
    assert torch.rand(3, device="cuda").isfinite().all()  # "Offset increment outside graph capture"
    torch.nn.functional.dropout(torch.ones(8, device="cuda"))


@on_gpu
@needs_gpu
def test_a_compiled_graph_has_the_numbers_of_an_eager_step() -> None:
    net = doxa.nets.mlp(3 * 16 * 16, 4, (32,)).cuda()
    flat = nn.Sequential(nn.Flatten(), net)
    compiled = fit(flat, engine="stack:compiled-graph", members=3)
    assert compiled.diagnostics["mode"] == "compiled-graph"
    eager = fit(flat, engine="stack:eager", members=3)
    for name, value in eager.tensors().items():
        torch.testing.assert_close(compiled.tensors()[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("members", "device", "kind"),
    [(8, "cuda", "stack"), (4, "cuda", "loop"), (8, "cpu", "loop")],
)
def test_many_members_of_a_resnet_are_stacked_on_a_gpu(
    members: int, device: str, kind: str
) -> None:
    """Measured on an H200: eight ResNet-20 take 25 ms together and 45 one by one, four 36 and
    22."""
    model = doxa.Model(doxa.nets.resnet20(), "categorical").build(torch.zeros(1, 3, 32, 32))
    assert choose_engine(model, members, torch.device(device)).kind == kind
