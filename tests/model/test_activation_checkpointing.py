"""Activations that the backward pass computes again: `fit(recompute=)` gives the same gradients,
noise and buffers with less memory. A network that does it by itself is refused, and no other one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import doxa
from doxa.errors import MethodError, ModelError
from doxa.model.layers import MaskedDropout

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


class Again(nn.Module):
    """A block that may be checkpointed: as a module, or as a function of its weight alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.head, self.how = nn.Linear(8, 1), how

    def forward(self, x: Tensor) -> Tensor:
        h: Any
        last = lambda h: (h @ self.weight).tanh()  # noqa: E731
        if self.how == "in training" and not self.training:
            h = last(self.block(x))
        elif self.how in ("module", "in training"):
            h = last(checkpoint(self.block, x, use_reentrant=False))
        elif self.how == "function":
            h = checkpoint(last, self.block(x), use_reentrant=False)
        else:
            h = last(self.block(x))
        return self.head(h)


def fit(net: nn.Module) -> Any:
    return doxa.fit(
        net, (X, X[:, 0]), "map", steps=3, validation=None, progress=False, likelihood="gaussian"
    )


@pytest.mark.parametrize("how", ["module", "function", "in training"])
def test_a_part_that_is_computed_again_is_refused(how: str) -> None:
    with pytest.raises(ModelError, match="again in the backward pass"):
        fit(Again(how))


def test_a_network_without_it_is_fitted() -> None:
    assert fit(Again("never")).status in ("ok", "not-evaluated", "underfit")


def test_gradients_that_are_not_finite_are_another_error() -> None:
    """A square root at zero has no finite gradient, with any weights."""

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            f = self.head(x)
            return f + (0.0 * f).sqrt()

    with pytest.raises(Exception) as caught:  # diverged, or not finite
        fit(Rooted())
        raise RuntimeError("was fitted")
    assert "again in the backward pass" not in str(caught.value)


D = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = D, D[:, 0].sin()


class Residual(nn.Module):
    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Dropout(0.0 if own else 0.3))
        self.out, self.own = nn.Linear(9, 9), own

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.out(self.inner(h))
        return dropout(h, 0.2, self.training) if self.own else h


class Blocks(nn.Module):
    """A list of blocks, one of which is called twice."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 9), nn.Linear(9, 1)
        self.h = nn.ModuleList(Residual(own) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in (*self.h, self.h[0]):
            h = block(h)
        return self.last(h)


def chain() -> nn.Module:
    """A sequence of single layers, with BatchNorm and dropout."""
    each = (
        layer for k in (4, 9, 9, 9)
        for layer in (nn.Linear(k, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Tanh())
    )  # fmt: skip
    return nn.Sequential(*each, nn.Linear(9, 1))


def normed() -> nn.Module:
    """Spectral norm writes a vector in every training pass, which the outputs depend on."""
    layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(k, 9)) for k in (4, 9, 9)]
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers), nn.Linear(9, 1))


NETS = {
    "blocks": Blocks, "chain": chain, "own draws": lambda: Blocks(own=True), "spectral": normed,
}  # fmt: skip
PARTS = {"blocks": "blocks", "chain": "blocks", "own draws": ("h.*",), "spectral": ("0", "1", "2")}
METHODS = {
    "map": "map", "mean-field": "mean-field", "mc-dropout": doxa.MCDropout(p=0.3),
    "sgld": doxa.SGLD(draws=4, burn_in=4),
}  # fmt: skip


def fitted(name: str, method: Any = "map", recompute: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    given = {
        "members": 2, "seed": 3, "progress": False, "validation": None, "engine": "loop",
        "likelihood": "gaussian", "recompute": recompute,
    } | options  # fmt: skip
    if not isinstance(method, doxa.SGLD):
        given.setdefault("steps", 8)
    return doxa.fit(NETS[name]().double(), DATA, method, **given)


def gap(one: Any, two: Any) -> float:
    return float((one.point() - two.point()).abs().max())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("net", NETS)
def test_the_gradient_is_the_same(net: str, method: str) -> None:
    """Eight steps, with the noise of dropout, BatchNorm, spectral norm and own random numbers."""
    plain = fitted(net, METHODS[method])
    again = fitted(net, METHODS[method], PARTS[net])
    assert gap(plain, again) < 1e-12
    for name, value in plain.buffers.items():
        torch.testing.assert_close(again.buffers[name], value, rtol=1e-12, atol=1e-12)
    assert gap(plain, fitted(net, METHODS[method], PARTS[net], seed=4)) > 1e-6


@pytest.mark.parametrize("net", NETS)
def test_a_large_network_takes_its_gradient_by_tensor(
    net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("doxa.method.run.LARGE", "doxa.method.state.LARGE"):
        monkeypatch.setattr(place, 1)
    assert gap(fitted(net), fitted(net, recompute=PARTS[net])) < 1e-12


def test_parts_are_run_twice_with_the_same_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = MaskedDropout.forward

    def forward(self: MaskedDropout, x: Tensor) -> Tensor:
        if self.uniform is not None:
            seen.append(self.uniform.clone())
        return real(self, x)

    monkeypatch.setattr(MaskedDropout, "forward", forward)
    options = {"members": 1, "steps": 1}
    fitted("blocks", doxa.MCDropout(p=0.3), **options)
    once = len(seen)
    seen.clear()
    fitted("blocks", doxa.MCDropout(p=0.3), "blocks", **options)
    extra = len(seen) - once
    assert extra > 0
    pairs = sum(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert pairs >= extra  # each mask of the second pass is one of the first


def test_batch_norm_counts_a_batch_once() -> None:
    found = fitted("chain", recompute="blocks").buffers
    counts = [v for name, v in found.items() if name.endswith("num_batches_tracked")]
    assert counts and all(bool((count == 8).all()) for count in counts)


def test_pieces_of_a_batch_and_a_frozen_trunk() -> None:
    assert gap(fitted("blocks"), fitted("blocks", recompute="blocks", microbatch=7)) < 1e-12
    assert gap(
        fitted("blocks", trunk="first"), fitted("blocks", recompute="blocks", trunk="first")
    ) < (1e-12)


@pytest.mark.parametrize("engine", ["stack", "loop:traced", "loop:compiled"])
def test_other_engines_are_refused(engine: str) -> None:
    with pytest.raises(MethodError, match="one member at a time"):
        fitted("blocks", recompute="blocks", engine=engine)


def test_the_rule_takes_one_member_at_a_time() -> None:
    found = fitted("chain", recompute="blocks", engine="auto").diagnostics
    assert (found["engine"], found["mode"]) == ("loop", "eager")


@pytest.mark.parametrize(
    ("given", "message"),
    [("layer*", "name of no layer"), (3, "must be None"), (["h.0", 1], "must be None")],
)
def test_parts_that_do_not_exist_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        fitted("blocks", recompute=given)


def test_a_network_without_blocks_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    with pytest.raises(ModelError, match="name the layers"):
        doxa.fit(net, DATA, "map", recompute="blocks", steps=1)
    with pytest.raises(ModelError, match="there is no network"):
        doxa.fit(None, DATA, "gp", recompute="blocks")


def test_the_plan_counts_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks of five numbers per row and unit: what is kept between them, and one block."""
    monkeypatch.setattr("doxa.model.model.LARGE", 1)
    width = 64
    block = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    )

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(nn.Sequential(*block(), nn.Identity()) for _ in range(8))
            self.last = nn.Linear(width, 1)

        def forward(self, x: Tensor) -> Tensor:
            for one in self.h:
                x = one(x)
            return self.last(x)

    x = torch.randn(4000, width)
    options = {"batch_size": 4000, "validation": None, "engine": "loop", "likelihood": "gaussian"}
    plain = doxa.plan(Deep(), (x, x[:, 0]), "map", **options)
    parts = [f"h.{i}" for i in range(8)]
    again = doxa.plan(Deep(), (x, x[:, 0]), "map", recompute=parts, **options)
    row = 4000 * width * 4  # bytes of one activation
    assert plain.memory["activations"] == (1 + 8 * 2) * row
    assert again.memory["activations"] == (1 + 8) * row + 1 * row
    assert 'recompute="blocks"' in plain.smaller
    assert 'recompute="blocks"' not in again.smaller


MEASURED = """
import sys, torch, doxa
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    def forward(self, h):
        return h + self.inner(h)

torch.manual_seed(0)
net = nn.Sequential(*(Block() for _ in range(10)), nn.Linear(128, 1))
x = torch.randn(4096, 128)
options = dict(validation=None, likelihood="gaussian", engine="loop", progress=False)
if sys.argv[1] == "blocks":
    options["recompute"] = "blocks"
def peak():  # of this process; `ru_maxrss` begins with that of the process that started it
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
doxa.fit(net, (x, x[:, 0]), "map", steps=1, batch_size=1, **options)
before = peak()
doxa.fit(net, (x, x[:, 0]), "map", steps=3, batch_size=4096, **options)
print((peak() - before) // 1024)
"""


@pytest.mark.slow
def test_less_memory_is_used() -> None:
    """In processes of their own, in which large tensors are returned to the system when freed."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    source = str(Path(doxa.__file__).parents[1])
    set_to = {"MALLOC_MMAP_THRESHOLD_": "262144", "PYTHONPATH": source}
    found = {}
    for how in ("none", "blocks"):
        command = [sys.executable, "-c", MEASURED, how]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env={**os.environ, **set_to},
        )
        found[how] = int(done.stdout)
    assert found["none"] > 80, found
    assert found["blocks"] < 0.6 * found["none"], found
