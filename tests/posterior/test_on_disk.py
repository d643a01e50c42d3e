"""Draws on disk are the draws in memory, bit for bit, in every use; and the memory stays free."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import CorruptedArtefact, MethodError, StoreError

METHODS: dict[str, Any] = {
    "hmc": doxa.HMC(draws=12, burn_in=8, leapfrog=3),
    "sgld": doxa.SGLD(draws=12, burn_in=8, thin=2, step_size=1e-4),
    "cyclical": doxa.CyclicalSGMCMC(cycles=3, draws=4, thin=2, exploration=0.5, step_size=1e-4),
}
TASKS = {"regression": ("gaussian", 1), "classification": ("categorical", 3)}


def table(task: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    return (x, x[:, :1].sin()) if task == "regression" else (x, x.argmax(1))


def fit(name: str, task: str = "regression", **options: Any) -> Any:
    likelihood, outputs = TASKS[task]
    net = options.pop("net", None) or doxa.nets.mlp(3, outputs, hidden=(8,), activation="tanh")
    settings = {"members": 3, "batch_size": 16, "likelihood": likelihood} | options
    return doxa.fit(net, table(task), METHODS[name], **settings)


def on_disk(posterior: Any) -> bool:
    """A mapped file is the storage of the whole file, and not what torch has allocated."""
    return not posterior.samples.untyped_storage().resizable()


def assert_same(got: Any, want: Any, task: str) -> None:
    x, y = table(task)
    assert torch.equal(got.samples, want.samples)
    assert (got.status, got.status.reason) == (want.status, want.status.reason)
    timed = ("seconds", "mode", "engine_reason")
    for key, value in want.diagnostics.items():
        assert key in timed or str(got.diagnostics[key]) == str(value), key
    for key, value in want.record.stats.items():
        assert torch.equal(got.record.stats[key], value)
    for n in (None, 1, 7, got.samples[..., 0].numel() - 1):  # all, and thinned
        one, two = got.predict(x, n=n), want.predict(x, n=n)
        assert torch.equal(one.samples, two.samples)
        assert torch.equal(one.log_prob(y), two.log_prob(y))
    one, two = got.predict(x, keep="moments"), want.predict(x, keep="moments")
    assert torch.equal(one.mean, two.mean)
    for key, value in want.draw(5).items():
        assert torch.equal(got.draw(5)[key], value)
    assert torch.equal(got.features(x), want.features(x))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", METHODS)
def test_a_tiny_budget_changes_nothing_but_the_place(name: str, task: str, tmp_path: Path) -> None:
    want = fit(name, task)
    got = fit(name, task, draws_budget=100)
    assert on_disk(got) and not on_disk(want)
    assert_same(got, want, task)
    got.save(tmp_path / "run")
    for budget in (100, None):
        back = doxa.load(tmp_path / "run", draws_budget=budget)
        assert_same(back, want, task)
    want.save(tmp_path / "other")  # the same file, whichever way
    first, second = (tmp_path / name / "tensors.safetensors" for name in ("run", "other"))
    assert first.read_bytes() == second.read_bytes()


def test_the_budget_is_the_size_of_the_draws() -> None:
    size = fit("hmc").samples.nbytes
    assert not on_disk(fit("hmc", draws_budget=size))
    assert on_disk(fit("hmc", draws_budget=size - 1))
    with pytest.raises(MethodError, match="draws_budget"):
        fit("hmc", draws_budget=-1)
    with pytest.raises(MethodError, match="draws_budget"):
        fit("hmc", draws_budget="1 GiB")


def test_the_default_is_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size = fit("sgld").samples.nbytes
    for free, expected in ((4 * size, False), (4 * size - 4, True)):
        monkeypatch.setattr("doxa.driver.loop.free_memory", lambda *_, free=free: free)
        assert on_disk(fit("sgld")) is expected


def test_runs_share_a_file() -> None:
    runs = doxa.Runs(rows=[torch.arange(25), torch.arange(50)])
    want, got = fit("sgld", runs=runs), fit("sgld", runs=runs, draws_budget=0)
    pointers = set()
    for one, two in zip(got, want, strict=True):
        assert_same(one, two, "regression")
        pointers.add(one.samples.untyped_storage().data_ptr())
    assert len(pointers) == 1


def test_buffers_of_chains_go_with_their_draws() -> None:
    def net() -> nn.Module:
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    with torch.random.fork_rng(devices=[]):
        want, got = fit("sgld", net=net()), fit("sgld", net=net(), draws_budget=0)
    assert_same(got, want, "regression")


class Killed(BaseException):
    """Ends a fit as abruptly as a test can."""


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed])
@pytest.mark.parametrize("budget", [0, None])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_taken_up_again(
    name: str, budget: int | None, error: Any, tmp_path: Path
) -> None:
    """Among its draws; and again when it is done."""
    want = fit(name)
    total = fit(name).diagnostics["steps"]

    def stop(done: int, _: Any) -> None:
        if done >= 0.6 * total:
            raise error

    options = {"checkpoint": tmp_path / "run", "draws_budget": budget, "checkpoint_every": 0}
    with pytest.raises(error):
        fit(name, callbacks=[stop], **options)
    steps: list[int] = []
    got = fit(name, callbacks=[lambda done, _: steps.append(done)], **options)
    assert steps[0] >= 0.6 * total
    assert on_disk(got) is (budget == 0)
    assert_same(got, want, "regression")
    assert_same(fit(name, **options), want, "regression")


@pytest.mark.slow
def test_no_checkpoint_writes_the_draws_again(tmp_path: Path) -> None:
    """In it are θ, its last good state and noise for the next 64 steps, but no draw."""

    def stop(done: int, _: Any) -> None:
        if done >= 900:
            raise KeyboardInterrupt

    method = doxa.SGLD(draws=1000, burn_in=0, thin=1, step_size=1e-4)
    net = doxa.nets.mlp(3, 1, hidden=(8,))
    with pytest.raises(KeyboardInterrupt):
        doxa.fit(net, table("regression"), method, members=2, checkpoint=tmp_path, callbacks=[stop])
    (last,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    theta = 2 * (3 * 8 + 8 + 8 + 1 + 1) * 4  # bytes
    assert (tmp_path / "draws").stat().st_size == 1000 * theta
    assert (last / "tensors.safetensors").stat().st_size < 250 * theta


def test_draws_that_were_damaged_are_not_gone_on_with(tmp_path: Path) -> None:
    options = {"checkpoint": tmp_path / "run", "checkpoint_every": 0}
    fit("hmc", **options)
    path = tmp_path / "run" / "draws"
    data = bytearray(path.read_bytes())
    data[1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptedArtefact, match=r"draws.*start afresh"):
        fit("hmc", **options)


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path: Path) -> None:
    def stop(done: int, _: Any) -> bool:
        return done >= 14

    want = fit("hmc", callbacks=[stop])
    assert 0 < want.samples.shape[1] < 12
    assert_same(fit("hmc", callbacks=[stop], draws_budget=0), want, "regression")
    options = {"checkpoint": tmp_path / "run", "checkpoint_every": 0}
    assert_same(fit("hmc", callbacks=[stop], draws_budget=0, **options), want, "regression")


def test_draws_that_are_not_finite_are_replaced_on_disk_too() -> None:
    method = doxa.SGLD(draws=30, burn_in=0, thin=1, step_size=10.0)
    net = doxa.nets.mlp(3, 1, hidden=(8,))
    want, got = (
        doxa.fit(net, table("regression"), method, members=2, draws_budget=budget)
        for budget in (None, 0)
    )
    assert want.status == got.status == "diverged"
    assert torch.equal(got.samples, want.samples)
    assert torch.isfinite(got.samples).all()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_disk_without_room_is_said_before_the_first_step(
    checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    steps: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    options = {"checkpoint": tmp_path / "run"} if checkpointed else {}
    with pytest.raises(StoreError, match=r"12 draws of 3 chains.*disk is full.*thin") as caught:
        fit("hmc", draws_budget=0, callbacks=[lambda done, _: steps.append(done)], **options)
    assert caught.value.errno == errno.ENOSPC
    assert steps == []


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StoreError, match=r"could not be written.*TMPDIR"):
        fit("sgld", draws_budget=0)
    fit("sgld", draws_budget=0, checkpoint=tmp_path / "run")  # a folder of one's own


@pytest.mark.slow
def test_draws_of_a_log_density(tmp_path: Path) -> None:
    def density(p: dict[str, Tensor]) -> Tensor:
        return -0.5 * p["x"].square().sum() + p["s"].log() - p["s"]

    def sample(**options: Any) -> doxa.Draws:
        init = {"x": torch.zeros(5), "s": 1.0}
        method = doxa.HMC(draws=40, burn_in=40, leapfrog=5)
        return doxa.sample(density, init, method, 3, constraints={"s": "positive"}, **options)

    want, got = sample(), sample(draws_budget=0)
    got.save(tmp_path / "run")
    assert not got.theta.untyped_storage().resizable()
    for other in (
        got, doxa.Draws.load(tmp_path / "run", draws_budget=0),
        sample(draws_budget=0, checkpoint=tmp_path / "c", checkpoint_every=0),
    ):  # fmt: skip
        assert torch.equal(other.theta, want.theta)
        assert torch.equal(other["s"], want["s"])
        assert (other.status, other.status.reason) == (want.status, want.status.reason)
        assert other.diagnostics["rhat"] == want.diagnostics["rhat"]
        assert other.diagnostics["moved"] == want.diagnostics["moved"]


def test_the_doctor_sees_no_difference() -> None:
    data = table("regression")
    found = [
        [(f.check, f.status, f.words) for f in doxa.diagnose.doctor(fit("hmc", **o), data).findings]
        for o in ({}, {"draws_budget": 0})
    ]
    assert found[0] == found[1]


WORKER = """
import gc, json, re, sys, threading, time
import torch, doxa

def anonymous():  # what the system cannot take back: the pages of a file it can
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

peak, done = [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

torch.set_num_threads(1)
x = torch.randn(16, 300, generator=torch.Generator().manual_seed(0))
y = x[:, :1].sin()
net = doxa.nets.mlp(300, 1, hidden=(1000,))
method = doxa.SGLD(draws=100, burn_in=1, thin=1, step_size=1e-7)
def fit(draws):
    method = doxa.SGLD(draws=draws, burn_in=1, thin=1, step_size=1e-7)
    return doxa.fit(net, (x, y), method, members=2, draws_budget=int(sys.argv[1]), progress=False)
fit(2).predict(x)  # whatever is allocated once
gc.collect()
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
found = {}
def phase(name):
    found[name] = peak[0] - before
    peak[0] = 0
posterior = fit(100)
phase("fit")
mean = posterior.predict(x).mean
phase("predict")
posterior.predict(x, n=150)
phase("thinned")
posterior.save(sys.argv[2])
phase("save")
size = posterior.samples.nbytes
del posterior
back = doxa.load(sys.argv[2], draws_budget=int(sys.argv[1]))
assert torch.equal(back.predict(x).mean, mean)
phase("load")
done.set()
print(json.dumps(found | {"size": size}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_stays_free(tmp_path: Path) -> None:
    """240 MB of draws: on disk never half of that is in memory, and what is does not grow with
    their number: the state, and what is gathered at a time."""

    def peaks(budget: int) -> dict[str, int]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        run = [sys.executable, "-c", WORKER, str(budget), str(tmp_path / f"run-{budget}")]
        done = subprocess.run(run, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    disk, memory = peaks(0), peaks(1 << 40)
    size = disk.pop("size")
    assert size == memory["size"] > 2e8
    assert memory["fit"] > size  # the measure sees what there is to see
    assert {name: peak for name, peak in disk.items() if peak > 0.5 * size} == {}
