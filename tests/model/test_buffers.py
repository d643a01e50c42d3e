"""Which buffers a training pass writes, and that they are written for each member."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import ModelError


def rows(count: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, generator=g, dtype=torch.float64)
    return x, x.sum(1).sin()


def fit(net: nn.Module, method: Any = "deep-ensemble", **options: Any) -> Any:
    chosen = {"steps": 60, "batch_size": 16, "members": 2, "progress": False, **options}
    return doxa.fit(net, rows(), method, likelihood="gaussian", dtype=torch.float64, **chosen)


class Writes(nn.Module):
    """One buffer for each way to write it, one that is only read, and one out of training too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        for name in ("assigned", "in_place", "through_data", "always", "same_value", "read"):
            self.register_buffer(name, torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        size = h.detach().abs().mean()
        if self.training:
            self.assigned = self.assigned + size
            self.in_place.add_(size)
            self.through_data.data.add_(size)
            self.same_value.mul_(1.0)
        self.always.add_(1.0)
        return self.read * h


def test_every_way_to_write_is_found() -> None:
    x, _ = rows(4)
    net = Writes()
    model = doxa.Model(net).build(x.float())
    assert set(model.written) == {"assigned", "in_place", "through_data", "always", "same_value"}
    assert set(model.tracked) == set(model.written)
    for own in (net, model.net):
        assert all(float(value) == 1.0 for value in own.buffers()), "the probe ran on a copy"


def test_a_pass_out_of_training_keeps_nothing() -> None:
    x, _ = rows(4)
    model = doxa.Model(Writes()).build(x.float())
    given = {"always": torch.full((), 5.0)}
    model.forward({}, x.float(), buffers=given)
    assert float(given["always"]) == 5.0


def test_spectral_vectors_of_an_already_converged_layer_are_found() -> None:
    """One output: v = w/|w| and u = ±1 from the first pass on, so that values do not change until
    weights do."""
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 1)))
    net.train()
    for _ in range(5):
        net(torch.ones(2, 3))
    model = doxa.Model(net).build(torch.ones(2, 3))
    assert {name.rpartition(".")[2] for name in model.written} == {"_u", "_v"}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("older", [False, True])
def test_each_member_follows_its_own_singular_vectors(engine: str, older: bool) -> None:
    """uᵀWv is the largest singular value of each member's W, which power iteration follows."""
    wrap = nn.utils.spectral_norm if older else nn.utils.parametrizations.spectral_norm
    torch.manual_seed(0)
    net = nn.Sequential(wrap(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 1))
    posterior = fit(net, engine=engine, steps=200, validation=None)
    names = ("0.weight_orig", "0.weight_u", "0.weight_v") if older else (
        "0.parametrizations.weight.original", "0.parametrizations.weight.0._u",
        "0.parametrizations.weight.0._v",
    )  # fmt: skip
    w = posterior.layout.unflatten(posterior.point())[names[0]]
    u, v = (posterior.buffers[name] for name in names[1:])
    assert not torch.equal(u[0], u[1])
    found = torch.einsum("mi,mij,mj->m", u, w, v)
    assert torch.allclose(found, torch.linalg.matrix_norm(w, 2), rtol=1e-3)


class Averages(nn.Module):
    """Counts passes, and averages the inputs' mean with weight 1/2: known without any weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.5 * self.average + 0.5 * x.mean(0)
            self.count = self.count + 1
        return self.layer(x)


@pytest.mark.parametrize("engine", ["auto", "stack", "loop", "stack:traced"])
def test_what_is_assigned_is_kept_by_every_engine(engine: str) -> None:
    """With all rows in each batch the average after t passes is (1 − 2⁻ᵗ) x̄, in closed form. The
    network's graph out of training has only layers that are stacked without vmap."""
    posterior = fit(
        Averages(), engine=engine, steps=10, batch_size=40, validation=None, standardize=False
    )
    x, _ = rows()
    assert posterior.buffers["count"].tolist() == [10, 10]
    want = (1 - 2.0**-10) * x.mean(0)
    assert torch.allclose(posterior.buffers["average"], want.expand(2, 3), rtol=1e-12)


def test_runs_of_unequal_length_do_not_see_padding() -> None:
    """A run beside a longer one averages over its own rows alone."""
    split = [list(range(40)), list(range(30))]
    sweep = doxa.fit(
        Averages(), rows(), "map", likelihood="gaussian", runs=doxa.Runs(rows=split), steps=12,
        members=1, validation=None, dtype=torch.float64, progress=False, batch_size=64,
    )  # fmt: skip
    x, _ = rows()
    want = (1 - 2.0**-12) * x[:30].mean(0)
    assert torch.allclose(sweep[1].buffers["average"][0], want, rtol=1e-12)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("average", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = x.mean(0)
        return self.layer(x)


def test_a_buffer_without_a_shape_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'average'.*Register it with its final shape"):
        fit(Lazy())


def test_swag_keeps_them_and_draws_with_each_members_own() -> None:
    """No BatchNorm, so no pass recomputes anything: the buffers are those of the last step."""
    posterior = fit(Averages(), doxa.SWAG(rank=2, cycle=1), batch_size=40, validation=None)
    x, _ = rows()
    assert posterior.kind == "gaussian"
    assert posterior.buffers["count"].tolist() == [60, 60]
    assert torch.allclose(posterior.buffers["average"][1], x.mean(0), rtol=1e-12)


class Aside(Averages):
    """The average is in no state_dict, and neither is a buffer that nothing writes."""

    def __init__(self, level: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3), persistent=False)
        self.register_buffer("level", torch.full((3,), level), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.level - self.average).sum()


def test_buffers_that_are_not_persistent_are_saved_too(tmp_path: Path) -> None:
    posterior, (x, _) = fit(Aside(level=2.0)), rows()
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=Aside())
    assert torch.equal(again.predict(x).samples, posterior.predict(x).samples)
    other = Aside()
    other.register_buffer("level", torch.zeros(1), persistent=False)
    with pytest.raises(ModelError, match="lacks the saved buffers"):
        doxa.load(tmp_path / "run", net=other)
