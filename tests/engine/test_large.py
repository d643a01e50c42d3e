"""Large networks: the same numbers as by rows of weights, without a copy of a row."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import doxa
from doxa.driver.loop import Driver
from doxa.errors import MethodError, ModelError
from doxa.method import Run

PLACES = (
    "doxa.method.run", "doxa.method.state", "doxa.priors.base", "doxa.driver.loop", "doxa.fit",
)  # fmt: skip


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of weights from which a network is large. The memory of all gradients of
    linear layers is then used again."""
    monkeypatch.setattr("doxa.method.state._REUSED", 1)

    def put(weights: int) -> None:
        for place in PLACES:
            __import__(place)
            monkeypatch.setattr(sys.modules[place], "LARGE", weights)

    return put


def network() -> nn.Module:
    """With a norm, whose scales have a prior centred at 1."""
    torch.manual_seed(1)
    layers = nn.Linear(5, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 20), nn.Linear(20, 3)
    return nn.Sequential(*layers).double()


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=g, dtype=torch.float64)
    return x, x[:, :3].sin() + 0.1 * torch.randn(60, 3, generator=g, dtype=torch.float64)


def fitted(method: Any, net: nn.Module | None = None, **options: Any) -> Any:
    settings = {
        "engine": "loop:eager", "batch_size": 16, "validation": None, "progress": False, "lr": 1e-3,
    } | options  # fmt: skip
    return doxa.fit(net or network(), data(), method, **settings)


def weights(posterior: Any) -> Tensor:
    return torch.cat([v.flatten() for v in posterior.tensors().values()])


PRIORS = {
    "one": doxa.Normal(0.7), "fan-in": doxa.FanInNormal(1.0), "tails": doxa.StudentTPrior(),
    "mixed": {"0.*": doxa.LaplacePrior(0.5), "3.weight": doxa.Normal(0.1)},
    "scales": doxa.Hierarchical(),
}  # fmt: skip


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("steps", "most"), [(1, 1e-10), (100, 1e-9)])
def test_steps_are_those_by_rows(
    prior: str, optimizer: str, steps: int, most: float, bounded: Any
) -> None:
    """DESIGN, section 4, in double precision: learned noise, norms, two members."""
    found = []
    for large in (1, 10**12):
        bounded(large)
        options = {"prior": PRIORS[prior], "optimizer": optimizer, "members": 2, "steps": steps}
        found.append(weights(fitted("map", **options)))
    assert (found[0] - found[1]).abs().max() <= most * found[1].abs().max()


METHODS = {
    "sgld": doxa.SGLD(draws=20, burn_in=5, thin=1),
    "sghmc": doxa.SGHMC(draws=20, burn_in=5, thin=1),
    "cyclical": doxa.CyclicalSGMCMC(inner="sghmc", draws=10, cycles=2, thin=1, exploration=0.5),
    "psgld": doxa.PSGLD(draws=20, burn_in=5, thin=1), "swag": doxa.SWAG(rank=3, cycle=1),
    "mc-dropout": doxa.MCDropout(), "swa": doxa.SWA(), "mean-field": doxa.MeanField(elbo_samples=1),
    "local": doxa.MeanField(elbo_samples=1, estimator="local"),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_those_by_rows(name: str, bounded: Any) -> None:
    """Those in blocks of columns, those that use the optimiser, and those that need rows."""
    found = []
    for large in (1, 10**12):
        bounded(large)
        found.append(weights(fitted(METHODS[name], members=2, steps=40)))
    assert (found[0] - found[1]).abs().max() <= 1e-9 * found[1].abs().max()


@pytest.mark.parametrize("classes", [True, False])
def test_newton_steps_are_those_by_rows(classes: bool, bounded: Any) -> None:
    """All weights of a classifier are uncertain; learned noise is a point, after them."""
    x, y = data()
    found = []
    for large in (1, 10**12):
        bounded(large)
        posterior = doxa.fit(
            network(), (x, y.argmax(1) if classes else y), doxa.IVON(elbo_samples=1), steps=40,
            members=2,
            engine="loop:eager", validation=None, progress=False, batch_size=16,
        )  # fmt: skip
        found.append((weights(posterior), posterior.elbo))
    assert (found[0][0] - found[1][0]).abs().max() <= 1e-9 * found[1][0].abs().max()
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)


class Tied(nn.Module):
    """One weight in two layers: autograd adds two gradients, which may not share memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(5, 20), nn.Linear(20, 3)
        self.middle = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x).tanh()).tanh()
        h = self.middle(h.unflatten(0, (1, -1))).flatten(0, 1)  # also of three axes
        out: Tensor = self.last(h)
        return out


def test_a_weight_that_is_used_twice_has_both_gradients(bounded: Any) -> None:
    found = []
    for large in (1, 10**12):
        bounded(large)
        found.append(weights(fitted("map", Tied().double(), steps=20)))
    assert (found[0] - found[1]).abs().max() <= 1e-10 * found[1].abs().max()


def test_the_memory_of_gradients_is_used_again(bounded: Any, allocated: list[int]) -> None:
    """A step of a network whose largest tensor has 900 numbers allocates none of that size."""
    bounded(1)
    seen: list[int] = []

    def last(step: int, _: Any) -> None:
        if step == 20:
            seen.extend(allocated[len(allocated) // 2 :])

    net = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 30), nn.Linear(30, 3)).double()
    fitted("map", net, steps=30, likelihood=doxa.Gaussian(0.1), callbacks=[last])
    assert len(seen) > 50 and max(seen) < 900


def test_runs_have_their_own_rates_and_priors(bounded: Any) -> None:
    grid = {"lr": [1e-3, 3e-3], "prior": [doxa.Normal(0.1), doxa.Normal(2.0)]}
    found = []
    for large in (1, 10**12):
        bounded(large)
        sweep = fitted("map", runs=doxa.Runs(grid=grid), steps=30)
        found.append(torch.cat([weights(sweep[i]) for i in range(4)]))
    assert (found[0] - found[1]).abs().max() <= 1e-9 * found[1].abs().max()


def test_early_stopping_keeps_the_same_state(bounded: Any) -> None:
    found = []
    for large in (1, 10**12):
        bounded(large)
        options = {"validation": 0.3, "patience": 2, "lr": 0.03, "steps": 400, "members": 2}
        posterior = fitted("map", **options)
        found.append((weights(posterior), posterior.diagnostics["stopping"]["kept_step"]))
    assert found[0][1] == found[1][1] and max(found[0][1]) < 400
    assert (found[0][0] - found[1][0]).abs().max() <= 1e-6 * found[1][0].abs().max()


def test_few_rows_are_cross_fitted(bounded: Any) -> None:
    """The fit to all rows ends at the step that the parts have chosen."""
    x, y = (part[:20] for part in data())
    found = []
    for large in (1, 10**12):
        bounded(large)
        options = {"lr": 0.03, "steps": 100, "batch_size": 8, "progress": False}
        found.append(doxa.fit(network(), (x, y), "map", engine="loop:eager", **options))
    steps = [posterior.diagnostics["steps"] for posterior in found]
    assert found[0].diagnostics["held_out"]["cross_fit_parts"] == 5
    assert steps[0] == steps[1] < 100
    assert (weights(found[0]) - weights(found[1])).abs().max() <= 1e-6


@pytest.mark.parametrize("average", [0.0, 0.5])
@pytest.mark.parametrize("kind", [doxa.MeanField, doxa.IVON])
def test_a_fit_holds_the_rows_that_are_announced(
    kind: type[Any], average: float, bounded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps. A gradient, of which there is one at a time, is kept by tensor."""
    bounded(1)
    monkeypatch.setattr("doxa.noise._MANY", 1)
    net, seen = network(), []
    size = 8 * sum(p.numel() for p in net.parameters())
    x, y = data()

    def places() -> set[int]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) is Tensor]
        storages = (t.untyped_storage() for t in tensors if t.layout is torch.strided)
        return {storage.data_ptr() for storage in storages if storage.nbytes() == size}

    others = places()  # of other tests

    def count(step: int, _: Any) -> None:
        if step == 20:
            seen.append(len(places() - others))

    method = kind(average=average, elbo_samples=1)
    doxa.fit(
        net, (x, y.argmax(1)), method, steps=40, members=1, callbacks=[count], batch_size=16,
        engine="loop:eager", validation=None, progress=False,
    )  # fmt: skip
    assert seen == [method.large_copies[0]]


@pytest.mark.parametrize("name", ["map", "sghmc"])
def test_a_resumed_fit_has_the_same_bits(name: str, bounded: Any, tmp_path: Path) -> None:
    bounded(1)
    method = METHODS.get(name, name)
    want = fitted(method, steps=60, members=2)
    calls: list[int] = []

    def stop(step: int, _: Any) -> None:
        calls.append(step)
        if len(calls) == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fitted(method, steps=60, members=2, checkpoint=folder, checkpoint_every=0, callbacks=[stop])
    got = fitted(method, steps=60, members=2, checkpoint=folder)
    assert torch.equal(weights(got), weights(want))


def test_a_diverged_member_has_its_last_finite_weights(bounded: Any) -> None:
    bounded(1)
    posterior = fitted("map", steps=200, lr=1e200, optimizer="sgd", schedule="constant")
    assert posterior.status == "diverged"
    assert bool(torch.isfinite(weights(posterior)).all())


def test_the_network_of_the_user_is_not_shared_after_a_fit(bounded: Any) -> None:
    bounded(1)
    net = network()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    posterior = fitted("map", net, steps=5)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(9.0)
    given = dict(posterior.model.net.named_parameters())
    assert all(torch.equal(given[k].detach(), before[k]) for k in given)


class New(TorchDispatchMode):
    """The sizes of the tensors that are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            every = (*args, *(kwargs or {}).values())
            given = {a.untyped_storage().data_ptr() for a in every if isinstance(a, Tensor)}
            if out.untyped_storage().data_ptr() not in given:
                self.sizes.append(out.numel())
        return out


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of tensors that the stages of a fit allocate after their first step."""
    mode = New()
    real = Driver._tick

    def tick(self: Driver, *args: Any) -> bool:
        if not mode.sizes:
            mode.sizes.append(0)
            mode.__enter__()
        return real(self, *args)

    monkeypatch.setattr(Driver, "_tick", tick)
    yield mode.sizes
    if mode.sizes:
        mode.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["map", "sgld", "sghmc"])
def test_a_step_allocates_no_row(
    name: str, bounded: Any, allocated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tensors of the network, of which the largest has half of the weights, are allocated;
    checks of the weights included."""
    bounded(1)
    monkeypatch.setattr("doxa.noise._NUMBERS", 128)  # more would be drawn ahead for several steps
    seen: list[int] = []
    methods = {
        "sgld": doxa.SGLD(draws=1, burn_in=29, thin=1), "map": "map",
        "sghmc": doxa.SGHMC(draws=1, burn_in=29, thin=1),
    }  # fmt: skip

    def last(step: int, _: Any) -> None:
        if step == 20:
            seen.extend(allocated)

    net = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 30), nn.Linear(30, 3)).double()
    fitted(methods[name], net, steps=30, likelihood=doxa.Gaussian(0.1), callbacks=[last])
    size = sum(p.numel() for p in net.parameters())
    assert len(seen) > 100 and max(seen) <= 900 < size


def test_the_rule_is_about_the_work(bounded: Any) -> None:
    """Stacked members, recorded steps and small networks have rows."""
    bounded(10**6)
    found: dict[str, bool] = {}
    real = Run.by_tensor.func  # type: ignore[attr-defined]
    for engine, limit in (("loop", 1), ("stack", 1), ("loop:traced", 1), ("loop", 10**6)):
        bounded(limit)

        class Noted(doxa.MAP):
            def init(self, run: Run, engine: str = f"{engine} {limit}") -> Any:
                found[engine] = real(run)
                return super().init(run)

        fitted(Noted(), engine=engine, steps=2)
    assert found == {
        "loop 1": True, "stack 1": False, "loop:traced 1": False, "loop 1000000": False,
    }  # fmt: skip


class Convolutional(nn.Module):
    """Remembers whether what follows its first convolution is in the format channels_last."""

    def __init__(self, look: bool, view: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.last, self.look, self.view = nn.Linear(6 * 36, 1), look, view

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        if self.look:  # vmap refuses the question
            FORMATS.append(h.is_contiguous(memory_format=torch.channels_last))
        return self.last(h.view(len(h), -1) if self.view else h.flatten(1))


FORMATS: list[bool] = []


def convolved(look: bool = True, view: bool = False, **options: Any) -> Any:
    torch.manual_seed(1)
    x = torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {
        "members": 2, "steps": 10, "seed": 0, "validation": None, "engine": "loop",
        "batch_size": 16, "likelihood": "gaussian", "progress": False,
    } | options  # fmt: skip
    FORMATS.clear()
    return doxa.fit(Convolutional(look, view).double(), (x, x[:, 0, 0, 0]), "map", **given)


def test_images_in_the_format_channels_last_give_the_same_steps() -> None:
    """To rounding. The posterior predicts, and stores its weights, as without it."""
    plain, found = convolved().point(), FORMATS.copy()
    posterior = convolved(channels_last=True)
    assert not any(found) and sum(FORMATS) >= 20  # every step of both members
    assert float((plain - posterior.point()).abs().max()) < 1e-12
    FORMATS.clear()
    posterior.predict(torch.zeros(3, 3, 6, 6, dtype=torch.float64))
    assert not any(FORMATS)
    grouped = convolved(compute=doxa.Compute(channels_last=True))
    assert torch.equal(grouped.point(), posterior.point())


def test_a_format_that_cannot_be_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MethodError, match="one at a time"):
        convolved(False, channels_last=True, engine="stack")
    convolved(False, channels_last=True, engine="auto")  # a narrow convolution is stacked
    assert "channels_last has no effect" in caplog.text
    with pytest.raises(ModelError, match="reshape in place of view"):
        convolved(view=True, channels_last=True)
