"""Batches are a function of the step, passes see every row once, every source gives the same."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import doxa
from doxa.data import Batch, Batches, Data, Pass, Standardisation, cast, standardise
from doxa.errors import DataError
from doxa.method import Clock, Info, Method, Run, Stage, State
from doxa.posterior import Posterior, SamplePosterior

N, D = 60, 3


def table(n: int = N, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, D, generator=g, dtype=dtype) * torch.tensor([1.0, 5.0, 0.1]) + 3
    y = x.sum(1, keepdim=True) + torch.randn(n, 1, generator=g, dtype=dtype)
    return x, y


def held(rows: list[Tensor], n: int = N, weight: Tensor | None = None) -> Data:
    """Rows whose only input is their own number."""
    x = torch.arange(n, dtype=torch.float64)[:, None]
    scales = [Standardisation()] * len(rows)
    device = torch.device("cpu")
    return Data(x, x.clone(), rows, scales, device, torch.float64, n, weight=weight)


def mlp() -> nn.Module:
    return doxa.nets.mlp(D, 1, hidden=(6,), activation="tanh").double()


def numbers(batch: Batch) -> Tensor:
    return batch.x[..., 0].long()


def counted(batch: Batch, m: int) -> Tensor:
    """The rows of a member that are not padding."""
    own = numbers(batch)[m]
    return own if batch.weight is None else own[batch.weight[m] > 0]


@dataclass(frozen=True)
class Probe(Method):
    """Adds up the gradients of one epoch of minibatches, and takes the full gradient."""

    name: ClassVar[str] = "probe"

    def init(self, run: Run) -> State:
        theta = run.start()
        zero = torch.zeros_like(theta)
        return {"theta": theta, "mini": zero, "full": zero, "value": zero[:, 0]}

    def stages(self, run: Run) -> Iterable[Stage]:
        count = run.settings.epoch_steps

        def mini(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            value, grad = _gradient(run, state, batch, clock)
            return {**state, "mini": state["mini"] + grad / count}, {"value": value}

        def full(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            value, grad = _gradient(run, state, batch, clock)
            new = {**state, "full": state["full"] + grad, "value": state["value"] + value}
            return new, {"value": value}

        yield Stage("mini", mini, count)
        yield Stage("full", full, 1, "pass")

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        posterior = SamplePosterior(
            samples=state["theta"].unsqueeze(1), **run.common(self), **run.shared(state)
        )
        posterior.record.diagnostics |= {k: state[k] for k in ("mini", "full", "value")}
        return posterior


def _gradient(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[Tensor, Tensor]:
    def objective(run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
        return run.log_likelihood(params["theta"], batch), {}

    value, grads, _ = run.value_and_grad(objective, state, batch, clock)
    return value, grads["theta"]


def probe(data: Any, **settings: Any) -> dict[str, Tensor]:
    posterior = doxa.fit(settings.pop("net", None) or mlp(), data, Probe(), **settings)
    return posterior.diagnostics


def test_a_batch_depends_on_its_step_only() -> None:
    rows = [torch.arange(N), torch.arange(0, N, 2)]
    make = lambda: Batches(held(rows), [0, 0, 1], ["0/0", "0/1", "0/0"], 7, "s")  # noqa: E731
    forward = make()
    straight = [numbers(forward.batch(t)) for t in range(200)]
    for t in (199, 0, 63, 64, 65, 130):  # a resumed run starts anywhere, also inside a block
        assert torch.equal(numbers(make().batch(t)), straight[t]), t
    assert forward.block == 64
    small = make()
    small.block = 5
    assert all(torch.equal(numbers(small.batch(t)), straight[t]) for t in range(20))


@pytest.mark.parametrize("most", [None, 20])
def test_how_many_steps_are_gathered_at_once_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    """Blocks of 5 steps, which 64 and 20 are cut into with and without a rest."""
    rows = [torch.arange(N), torch.arange(N // 2)]
    make = lambda most: Batches(held(rows), [0, 1], ["0/0", "0/1"], 7, "s", most=most)  # noqa: E731
    whole = make(None)
    want = [numbers(whole.batch(t)) for t in range(most or 140)]
    monkeypatch.setattr("doxa.data.batches.BLOCK_BYTES", 5 * 2 * 7 * 16)
    cut = make(most)
    assert (whole.block, cut.block) == (64, 5)
    assert all(torch.equal(numbers(cut.batch(t)), each) for t, each in enumerate(want))


def test_a_members_rows_depend_on_its_key_only() -> None:
    rows = [torch.arange(N)]
    alone = Batches(held(rows), [0], ["0/3"], 8, "s")
    among = Batches(held(rows), [0, 0, 0], ["0/1", "0/3", "5/3"], 8, "s")
    for t in (0, 6, 7, 8, 100):
        one, three = numbers(alone.batch(t)), numbers(among.batch(t))
        assert torch.equal(one, three[1])
        assert not torch.equal(three[0], three[1]) and not torch.equal(three[1], three[2])


def test_batches_that_are_dealt_out_are_shuffled_where_one_holds_all_rows() -> None:
    """Else the k-th part of a batch would be the same rows at every step: after 60 steps each row
    has been in the first half (it misses one of ten with probability 10 · 2^-60)."""
    dealt = Batches(held([torch.arange(10)], 10), [0], ["0"], 16, "s", shuffled=True)
    first = set()
    for t in range(60):
        rows = numbers(dealt.batch(t)).tolist()
        assert sorted(rows) == list(range(10))
        first |= set(rows[::2])
    assert first == set(range(10))


def test_seed_and_stage_change_the_order() -> None:
    rows = [torch.arange(N)]
    drawn = [
        numbers(Batches(held(rows), [0], [f"{seed}/0"], N // 2, stage).batch(0)).tolist()
        for seed, stage in ((0, "a"), (1, "a"), (0, "b"))
    ]
    assert drawn[0] != drawn[1] and drawn[0] != drawn[2]


@pytest.mark.parametrize("size", [1, 7, 20, 60, 1000])
def test_an_epoch_visits_each_row_once_but_for_the_remainder(size: int) -> None:
    lengths = (60, 41)
    rows = [torch.arange(60), torch.arange(3, 44)]
    batches = Batches(held(rows), [0, 1], ["0/0", "0/1"], size, "s")
    for m, length in enumerate(lengths):
        own = min(size, length)
        for epoch in range(3):
            steps = range(epoch * (length // own), (epoch + 1) * (length // own))
            seen = torch.cat([counted(batches.batch(t), m) for t in steps])
            assert len(seen) == len(set(seen.tolist())) == length - length % own
            assert set(seen.tolist()) <= set(rows[m].tolist())
        assert float(batches.scale[m]) == pytest.approx(length / own)


def test_epochs_differ_and_drop_different_rows() -> None:
    batches = Batches(held([torch.arange(10)], 10), [0], ["0"], 4, "s")
    dropped = set()
    for epoch in range(60):
        seen = torch.cat([numbers(batches.batch(2 * epoch + i)) for i in range(2)])
        dropped |= set(range(10)) - set(seen.tolist())
    assert dropped == set(range(10))  # misses one of ten with probability 10 · 0.8^60


@pytest.mark.parametrize("size", [None, 1, 7, 16, 41, 500])
def test_a_pass_visits_each_row_exactly_once(size: int | None) -> None:
    rows = [torch.arange(60), torch.arange(3, 44), torch.tensor([5])]
    visited = Pass(held(rows), [0, 1, 1, 2], size)
    seen: list[list[int]] = [[], [], [], []]
    for t in range(visited.steps):
        batch = visited.batch(t)
        weight = torch.ones_like(batch.x[..., 0]) if batch.weight is None else batch.weight
        for m in range(4):
            real = weight[m] > 0
            assert set(weight[m].unique().tolist()) <= {0.0, 1.0}
            seen[m] += numbers(batch)[m][real].tolist()
    assert seen == [rows[r].tolist() for r in (0, 1, 1, 2)]
    assert visited.scale.tolist() == [1.0] * 4


def test_a_pass_over_one_run_shares_its_rows() -> None:
    weight = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    visited = Pass(held([torch.arange(5, 30)], weight=weight), [0, 0], 10)
    seen = [visited.batch(t) for t in range(visited.steps)]
    assert [batch.shared for batch in seen] == [True] * 3
    assert torch.cat([numbers(batch) for batch in seen]).tolist() == list(range(5, 30))
    assert torch.equal(torch.cat([b.weight for b in seen], 1), weight[5:30].expand(2, -1))  # type: ignore[misc]


def test_padding_keeps_the_rows_own_weights() -> None:
    weight = torch.arange(1, N + 1, dtype=torch.float64)
    visited = Pass(held([torch.arange(6), torch.arange(10, 14)], weight=weight), [0, 1])
    batch = visited.batch(0)
    assert batch.weight is not None
    assert batch.weight.tolist() == [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 0, 0]]


@pytest.mark.parametrize("size", [1, 4, 12, 60])
@pytest.mark.parametrize("weighted", [False, True])
def test_minibatch_gradients_are_unbiased(size: int, weighted: bool) -> None:
    """The mean over an epoch of (n/B) Σ_batch ∇ log p is the full gradient, exactly."""
    weight = torch.linspace(0.1, 3, N) if weighted else None
    seen = probe(table(), batch_size=size, members=2, sample_weight=weight, engine="stack")
    torch.testing.assert_close(seen["mini"], seen["full"], rtol=1e-10, atol=1e-10)


def test_the_full_gradient_is_autograds() -> None:
    x, y = table()
    net = mlp()
    seen = probe((x, y), net=net, init="given", likelihood=doxa.Gaussian(noise=1.0))
    loss = (net(x) - y).square().sum() / 2
    grads = torch.autograd.grad(loss, list(net.parameters()))
    expected = -torch.cat([g.flatten() for g in grads])
    torch.testing.assert_close(seen["full"][0], expected, rtol=1e-10, atol=1e-10)


def test_weight_two_is_a_row_twice_for_the_log_density() -> None:
    x, y = table(20)
    weight = torch.ones(20)
    weight[[3, 7]] = 2.0
    weight[11] = 0.0
    again = torch.cat([torch.arange(11), torch.arange(12, 20), torch.tensor([3, 7])])
    weighted = probe((x, y), sample_weight=weight)
    repeated = probe((x[again], y[again]))
    for name in ("value", "full"):
        torch.testing.assert_close(weighted[name], repeated[name], rtol=1e-10, atol=1e-10)


def test_weight_two_is_a_row_twice_for_map_and_hmc() -> None:
    x, y = table(20)
    weight = torch.ones(20)
    weight[5] = 2.0
    twice = torch.cat([torch.arange(20), torch.tensor([5])])
    net = mlp()
    methods: list[tuple[Method, dict[str, Any]]] = [
        (doxa.MAP(), {"steps": 30, "batch_size": 100, "validation": None}),
        (doxa.HMC(draws=6, burn_in=10, leapfrog=3), {"members": 2}),
    ]
    for method, settings in methods:
        a = doxa.fit(net, (x, y), method, sample_weight=weight, **settings)
        b = doxa.fit(net, (x[twice], y[twice]), method, **settings)
        torch.testing.assert_close(a.samples, b.samples, rtol=1e-6, atol=1e-7)


class Pairs(Dataset[Any]):
    def __init__(self, x: dict[str, Tensor], y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return {k: v[i] for k, v in self.x.items()}, self.y[i]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, 4), nn.Linear(2, 4)
        self.top = nn.Linear(4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.top(torch.tanh(self.left(a) + self.right(b)))


def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that hardly any memory is free, so that everything streams, and that a fit may begin
    all the same."""
    patch(monkeypatch, "free_memory", lambda *_: 64)
    monkeypatch.setattr("doxa.method.method.free_memory", lambda *_: 1 << 30)


def patch(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Replace a function wherever doxa has imported it."""
    for path, module in list(sys.modules.items()):
        if path.startswith("doxa.") and hasattr(module, name):
            monkeypatch.setattr(module, name, value)


def same(a: Any, b: Any) -> None:
    assert torch.equal(a.samples, b.samples)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True], ids=["in memory", "streamed"])
def test_every_source_of_rows_gives_the_same_fit(
    streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = table()
    net = mlp()
    settings: dict[str, Any] = {"members": 2, "steps": 12, "batch_size": 16}
    expected = doxa.fit(net, (x, y), **settings)
    if streams:
        scarce(monkeypatch)
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "y.npy", y.numpy())
    maps = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    sources: dict[str, Any] = {
        "tensors": (x, y), "vector y": (x, y[:, 0]), "arrays": (x.numpy(), y.numpy()),
        "lists": (x.tolist(), y.tolist()), "dataset": TensorDataset(x, y),
        "reversed view": (x.numpy()[::-1][::-1], y.numpy()), "memmap": maps,
        "loader": DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True),
    }  # fmt: skip
    for name, source in sources.items():
        posterior = doxa.fit(net, source, **settings)
        assert torch.equal(posterior.samples, expected.samples), name


def test_a_loader_brings_its_batch_size() -> None:
    x, y = table()
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    net = mlp()
    same(doxa.fit(net, loader, steps=7), doxa.fit(net, (x, y), steps=7, batch_size=5))
    same(
        doxa.fit(net, loader, steps=7, batch_size=20), doxa.fit(net, (x, y), steps=7, batch_size=20)
    )


def test_a_negative_stride_is_only_a_view() -> None:
    x, y = table()
    net = mlp()
    flipped = doxa.fit(net, (x.numpy()[::-1], y.numpy()[::-1]), steps=3)
    same(flipped, doxa.fit(net, (x.flip(0), y.flip(0)), steps=3))


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_several_inputs(kind: str, standardize: bool) -> None:
    x, y = table()
    extra = x[:, :2].exp() / 1000
    packed: Any = {"tuple": (x, extra), "list": [x, extra], "dict": {"a": x, "b": extra}}[kind]
    net = TwoInputs().double()
    posterior = doxa.fit(net, (packed, y), steps=5, standardize=standardize, init="given", lr=1e-3)
    p = posterior.predict(packed)
    assert p.mean.shape == (N, 1)
    one = tree_map(lambda v: v[3:4], packed)
    torch.testing.assert_close(posterior.predict(one).mean, p.mean[3:4], rtol=1e-9, atol=1e-9)
    params = posterior.layout.unflatten(posterior.samples[0, 0])
    params = {k: v for k, v in params.items() if not k.startswith("likelihood.")}
    inputs, units = (x, extra), lambda f: f
    if standardize:
        inputs = tuple((v - v.mean(0)) / v.std(0, correction=0) for v in inputs)  # type: ignore[assignment]
        units = lambda f: f * y.std(0, correction=0) + y.mean(0)  # noqa: E731
    by_hand = torch.func.functional_call(net, params, inputs)
    torch.testing.assert_close(p.mean, units(by_hand), rtol=1e-9, atol=1e-9)


def test_a_dataset_of_dicts_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = table()
    packed = {"a": x, "b": x[:, :2]}
    net = TwoInputs().double()
    expected = doxa.fit(net, (packed, y), steps=4, members=2)
    scarce(monkeypatch)
    same(doxa.fit(net, Pairs(packed, y), steps=4, members=2), expected)


def test_datasets_that_cannot_be_used() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    x, y = table()
    with pytest.raises(DataError, match="IterableDataset"):
        doxa.fit(mlp(), DataLoader(Stream()))
    with pytest.raises(DataError, match="IterableDataset"):
        doxa.fit(mlp(), Stream())
    with pytest.raises(DataError, match=r"N = 0"):
        doxa.fit(mlp(), TensorDataset(x[:0], y[:0]))
    with pytest.raises(DataError, match="pair"):
        doxa.fit(mlp(), TensorDataset(x))


@pytest.mark.slow
def test_large_arrays_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Float64 rows for a float32 network must not be copied whole, standardised or not."""
    x, y = table(dtype=torch.float64)
    np.save(tmp_path / "x.npy", x.numpy())
    source = np.load(tmp_path / "x.npy", mmap_mode="r")
    net = doxa.nets.mlp(D, 1, hidden=(6,))
    plain, scaled = (
        doxa.fit(net, (source, y), steps=5, standardize=s, members=2) for s in (False, True)
    )
    scarce(monkeypatch)
    copied: list[int] = []

    def watched(t: Tensor, *args: Any) -> Tensor:
        copied.append(t.shape[0] if t.ndim == 2 else 0)
        return cast(t, *args)

    patch(monkeypatch, "cast", watched)
    with caplog.at_level(logging.INFO, "doxa"):
        again = doxa.fit(net, (source, y), steps=5, members=2)
    assert "each batch is moved to the device" in caplog.text
    assert max(copied) < N
    same(again, plain)
    same(doxa.fit(net, (source, y), steps=5, standardize=True, members=2), scaled)
    runs = doxa.Runs(rows=[range(40), range(20, 60)])
    streamed = doxa.fit(net, (source, y), steps=5, standardize=True, runs=runs)
    monkeypatch.undo()
    for a, b in zip(
        streamed, doxa.fit(net, (source, y), steps=5, standardize=True, runs=runs), strict=True
    ):
        same(a, b)


def test_scales_are_those_of_the_training_rows() -> None:
    x, y = table()
    posterior = doxa.fit(mlp(), (x, y), steps=2, standardize=True)
    scales = posterior.scales
    torch.testing.assert_close(scales.x_loc, x.mean(0))
    torch.testing.assert_close(scales.x_scale, x.std(0, correction=0))
    torch.testing.assert_close(scales.y_loc, y.mean(0))
    held_out = doxa.fit(mlp(), (x, y), steps=2, standardize=True, validation=(x + 100, y + 100))
    torch.testing.assert_close(held_out.scales.x_loc, x.mean(0))


def test_each_run_is_standardised_by_its_own_rows() -> None:
    x, y = table()
    splits = [torch.arange(40), torch.arange(15, 60), torch.arange(0, 60, 2)]
    net = mlp()
    settings: dict[str, Any] = {"steps": 20, "batch_size": 10, "standardize": True, "members": 2}
    sweep = doxa.fit(net, (x, y), runs=doxa.Runs(rows=splits), **settings)
    for k, (posterior, rows) in enumerate(zip(sweep, splits, strict=True)):
        alone = doxa.fit(net, (x[rows], y[rows]), seed=k, **settings)
        torch.testing.assert_close(posterior.scales.x_loc, x[rows].mean(0))
        torch.testing.assert_close(posterior.samples, alone.samples, rtol=1e-7, atol=1e-8)
        p, q = posterior.predict(x), alone.predict(x)
        torch.testing.assert_close(p.mean, q.mean, rtol=1e-7, atol=1e-8)


def test_standardising_does_not_round_large_offsets_away() -> None:
    """A time stamp of 1.7e9 ± 100 s has no digits left in float32: scale first, then cast."""
    x, y = table()
    shifted = x.clone()
    shifted[:, 1] = 1.7e9 + 20 * x[:, 1]
    net = doxa.nets.mlp(D, 1, hidden=(6,))
    small = doxa.fit(net, (x, y), steps=20, standardize=True)
    large = doxa.fit(net, (shifted, y), steps=20, standardize=True)
    torch.testing.assert_close(large.samples, small.samples, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        large.predict(shifted).mean, small.predict(x).mean, rtol=1e-3, atol=1e-3
    )


def test_integer_columns_are_left_alone() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.top = nn.Embedding(4, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.table(x))

    x = torch.arange(N) % 4
    y = x.double().square()
    posterior = doxa.fit(Embeds(), (x, y), steps=300, standardize=True, lr=0.05)
    means = posterior.predict(torch.arange(4)).mean
    torch.testing.assert_close(means, torch.tensor([0.0, 1.0, 4.0, 9.0]), rtol=0.1, atol=0.3)


def test_validation_is_held_out() -> None:
    x, y = table()
    share = doxa.fit(mlp(), (x, y), steps=5, validation=0.25)
    assert share.diagnostics["rows"] == 45 and share.validation is not None
    pair = doxa.fit(mlp(), (x[:40], y[:40]), steps=5, validation=(x[40:], y[40:]))
    assert pair.diagnostics["rows"] == 40
    score = float(pair.predict(x[40:]).log_prob(y[40:]).mean())
    assert 0 < score - pair.validation <= 2 / len(y[40:]) + 1e-9  # the step and the noise


def test_a_constant_column_is_said_once_for_all_runs(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.stack([torch.arange(6.0), torch.ones(6)], 1)
    rows = [torch.arange(4), torch.arange(5), torch.arange(1, 6)]
    with caplog.at_level("WARNING", logger="doxa"):
        standardise(x, torch.arange(6.0), rows, scale_y=True)
    assert [r.getMessage() for r in caplog.records] == ["x: constant column [1] gets scale 1"]
