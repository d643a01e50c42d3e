"""Ctrl-C: the checkpoint is written, KeyboardInterrupt comes out, and resuming is bit-identical."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa.driver.loop import Interrupts
from doxa.store import Checkpoints

WORKER = Path(__file__).with_name("worker.py")
spec = importlib.util.spec_from_file_location("hostile_worker", WORKER)
assert spec is not None and spec.loader is not None
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

SHORT: dict[str, dict[str, Any]] = {
    "map": {"steps": 300, "engine": "loop"},
    "deep-ensemble": {"steps": 300, "engine": "stack"},
    "mean-field": {"steps": 300, "engine": "stack"},
    "hmc": {"method": doxa.HMC(draws=30, burn_in=30, leapfrog=3), "engine": "stack"},
}


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    """Whatever the test runner does with SIGINT, here Python's own handler is in place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def same(a: Any, b: Any) -> None:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(a.predict(x).mean, b.predict(x).mean)
    assert a.history == b.history
    assert {k: v for k, v in a.tensors().items() if not torch.equal(v, b.tensors()[k])} == {}


def press_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("name", SHORT)
def test_ctrl_c_at_any_moment_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    expected = worker.fit(name, **SHORT[name])
    presses = 0
    for seconds in (0.03, 0.04, 0.05, 0.06, 60.0):
        timer = press_after(seconds)
        try:
            resumed = worker.fit(name, tmp_path / "c", 1e9, **SHORT[name])
            break
        except KeyboardInterrupt:
            presses += 1
        finally:
            timer.cancel()
            timer.join()
    assert presses > 0
    same(resumed, expected)


@pytest.mark.slow
def test_a_recorded_step_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Recording starts at whatever step the run resumes at; it must not change the numbers."""
    settings = SHORT["deep-ensemble"] | {"engine": "stack:traced"}

    def press(step: int, _info: dict[str, Any]) -> None:
        if step == 150:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.fit("deep-ensemble", tmp_path / "c", 1e9, [press], **settings)
    resumed = worker.fit("deep-ensemble", tmp_path / "c", 1e9, **settings)
    assert resumed.diagnostics["mode"] == "traced"
    same(resumed, worker.fit("deep-ensemble", **settings))
    same(
        resumed, worker.fit("deep-ensemble", **SHORT["deep-ensemble"])
    )  # nor does recording itself


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["deep-ensemble", "mean-field"])
def test_a_captured_step_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    """A graph updates the state in place: what is saved must still be of one step."""
    settings = SHORT[name] | {"engine": "stack:graph", "device": "cuda"}

    def press(step: int, _info: dict[str, Any]) -> None:
        if step == 150:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.fit(name, tmp_path / "c", 1e9, [press], **settings)
    resumed = worker.fit(name, tmp_path / "c", 1e9, **settings)
    expected = worker.fit(name, **settings)
    assert resumed.history == expected.history
    for key, value in expected.tensors().items():
        assert torch.equal(value, resumed.tensors()[key]), key


@pytest.mark.slow
def test_a_callback_may_press_ctrl_c(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def press(step: int, _info: dict[str, Any]) -> None:
        if step == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.fit("map", tmp_path / "c", 1e9, [press], **SHORT["map"])
    latest = Checkpoints(tmp_path / "c").latest()
    assert latest is not None and latest.step == 100
    assert "stopped at step 100; checkpoint written, fit again to resume" in caplog.text
    same(worker.fit("map", tmp_path / "c", 1e9, **SHORT["map"]), worker.fit("map", **SHORT["map"]))


def test_without_a_checkpoint_ctrl_c_is_immediate() -> None:
    seen = []

    def press(step: int, _info: dict[str, Any]) -> None:
        seen.append(step)
        signal.raise_signal(signal.SIGINT)
        seen.append(-1)

    with pytest.raises(KeyboardInterrupt):
        worker.fit("map", callbacks=[press], **SHORT["map"])
    assert seen == [1]


def test_a_second_ctrl_c_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts().deferred() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pending
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one is immediate")


def test_a_programs_own_handler_is_left_alone() -> None:
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    with Interrupts().deferred() as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert pressed == [1] and not interrupts.pending
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_do_not_touch_signals(tmp_path: Path) -> None:
    results = []
    run = lambda: results.append(worker.fit("map", tmp_path / "c", steps=20))  # noqa: E731
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(results) == 1


@pytest.mark.slow
def test_an_exception_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    def fail(step: int, _info: dict[str, Any]) -> None:
        if step == 200:
            raise ZeroDivisionError("the caller's own mistake")

    with pytest.raises(ZeroDivisionError):
        worker.fit("map", tmp_path / "c", 0.01, [fail], **SHORT["map"])
    assert Checkpoints(tmp_path / "c").latest() is not None
    same(worker.fit("map", tmp_path / "c", 1e9, **SHORT["map"]), worker.fit("map", **SHORT["map"]))


@pytest.mark.slow
def test_a_finished_fit_fits_again_from_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = worker.fit("deep-ensemble", tmp_path / "c", 0.01, **SHORT["deep-ensemble"])
    with caplog.at_level(logging.INFO, "doxa"):
        again = worker.fit("deep-ensemble", tmp_path / "c", 0.01, **SHORT["deep-ensemble"])
    assert "resuming at step" in caplog.text
    same(again, first)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
def test_ctrl_c_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(WORKER),
        "hmc",
        str(tmp_path / "c"),
        str(tmp_path / "out"),
        "1e9",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() not in ("running\n", ""):
            pass
        process.send_signal(signal.SIGINT)
        error = process.stderr.read()
    assert process.returncode == -signal.SIGINT  # as a shell expects of a program that was stopped
    assert "KeyboardInterrupt" in error and "fit again to resume" in error
    latest = Checkpoints(tmp_path / "c").latest()
    assert latest is not None and 0 < latest.step < 160
    assert not (tmp_path / "out").exists()
    same(worker.fit("hmc", tmp_path / "c", 1e9), worker.fit("hmc"))


@pytest.mark.parametrize("name", ["laplace", "constant-sgd", "swa"])
def test_a_stopped_fit_that_is_interrupted_later_still_says_so(tmp_path: Path, name: str) -> None:
    """A callback ends the first stage; Ctrl-C comes in a later one. Whoever resumes has no
    callback, and learns all the same that the weights were not trained to the end."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=g)
    options = {
        "method": doxa.get_method(name)(**doxa.methods()[name].short), "steps": 400,
        "likelihood": doxa.Gaussian(0.5), "checkpoint": tmp_path / "run", "progress": False,
        "dtype": torch.float64,
    }  # fmt: skip
    said: list[int] = []

    def stop_then_interrupt(done: int, info: dict[str, Any]) -> bool:
        if said:
            raise KeyboardInterrupt
        if done >= 20:
            said.append(done)
        return bool(said)

    fit = lambda **more: doxa.fit(  # noqa: E731
        torch.nn.Linear(3, 1), (x, x.sum(1)), **options, **more
    )
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[stop_then_interrupt])
    posterior = fit()
    assert posterior.diagnostics["steps"] < 400
    assert posterior.status != "ok"
    if name != "constant-sgd":  # a chain that has not converged says that first
        assert posterior.status == "stopped"
        assert f"step {said[0]}" in posterior.status.reason
