"""Full disks, damaged files, other people's checkpoints: nothing lost, nothing silent."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import CorruptedArtefact, FolderInUse, MethodError, ModelError, StoreError
from doxa.store import Checkpoints, read_artefact, write_artefact

N, D = 24, 2
STEPS = 22  # callbacks come at steps 1, 10, 20 and the last


def table() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def mlp() -> nn.Module:
    return doxa.nets.mlp(D, 1, hidden=(4,))


def fit(folder: Path, net: nn.Module | None = None, data: Any = None, **settings: Any) -> Any:
    settings = {
        "steps": STEPS,
        "members": 2,
        "checkpoint": folder,
        "checkpoint_every": 1e9,
    } | settings
    return doxa.fit(net or mlp(), data or table(), **settings)


class Full:
    """Writing, or syncing, fails from some call on, as on a full disk or a spent quota."""

    def __init__(self, calls: int, code: int) -> None:
        self.calls, self.code = calls, code

    def patch(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        real: Callable[..., Any] = getattr(os, function)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            self.calls -= 1
            if self.calls < 0:
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, function, refuse)


@pytest.mark.parametrize("function", ["fsync", "mkdir", "rename"])
@pytest.mark.parametrize("code, reason", [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota")])
def test_a_full_disk_while_checkpointing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, reason: str
) -> None:
    expected = doxa.fit(mlp(), table(), steps=STEPS, members=2)
    before = fit_until(tmp_path / "c", 10)
    assert before is not None
    with monkeypatch.context() as patched:
        Full(7, code).patch(patched, function)
        with pytest.raises(StoreError, match=reason) as caught:
            fit(tmp_path / "c", checkpoint_every=0)
        assert caught.value.errno == code
        assert str(tmp_path / "c") in str(caught.value)
    latest = Checkpoints(tmp_path / "c").latest()
    assert latest is not None and latest.step >= before.step
    assert not [name for name in os.listdir(tmp_path / "c") if name.startswith(".")]
    assert torch.equal(fit(tmp_path / "c").samples, expected.samples)


def test_a_full_disk_while_the_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_until(tmp_path / "c", 10)
    before = sorted(os.listdir(tmp_path / "c"))
    real = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        real(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", half)
        with pytest.raises(StoreError, match="disk is full"):
            fit(tmp_path / "c", checkpoint_every=0)
        with pytest.raises(StoreError, match="disk is full"):
            doxa.fit(mlp(), table(), steps=2).save(tmp_path / "posterior")
    assert sorted(os.listdir(tmp_path / "c")) == before
    assert not (tmp_path / "posterior").exists()


def test_a_full_disk_does_not_swallow_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def press(step: int, _info: dict[str, Any]) -> None:
        if step >= 10:
            Full(0, errno.ENOSPC).patch(monkeypatch, "fsync")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "c", callbacks=[press])
    assert "without a checkpoint" in caplog.text and "disk is full" in caplog.text


def fit_until(folder: Path, step: int) -> Any:
    """Fit up to a step, as if the process had ended there; the checkpoint it leaves."""

    def press(done: int, _info: dict[str, Any]) -> None:
        if done >= step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(folder, callbacks=[press], checkpoint_every=0)
    return Checkpoints(folder).latest()


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped tensors": lambda p: flip(p / "tensors.safetensors"),
    "flipped header": lambda p: flip(p / "tensors.safetensors", 12),
    "truncated tensors": lambda p: truncate(p / "tensors.safetensors"),
    "empty tensors": lambda p: (p / "tensors.safetensors").write_bytes(b""),
    "flipped meta": lambda p: flip(p / "meta.json"),
    "missing meta": lambda p: (p / "meta.json").unlink(),
    "missing checksums": lambda p: (p / "checksums.sha256").unlink(),
    "other checksums": lambda p: (p / "checksums.sha256").write_text("0" * 64 + "  meta.json\n"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_posterior_is_never_loaded(tmp_path: Path, damage: str) -> None:
    doxa.fit(mlp(), table(), steps=2).save(tmp_path / "p")
    DAMAGE[damage](tmp_path / "p")
    with pytest.raises(CorruptedArtefact, match=str(tmp_path / "p")):
        doxa.load(tmp_path / "p")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = doxa.fit(mlp(), table(), steps=STEPS, members=2)
    latest = fit_until(tmp_path / "c", 10)
    newest = max(p for p in (tmp_path / "c").iterdir())
    DAMAGE[damage](newest)
    before = Checkpoints(tmp_path / "c").latest()
    assert before is not None and before.step <= latest.step
    assert "damaged checkpoint" in caplog.text
    assert torch.equal(fit(tmp_path / "c").samples, expected.samples)


def test_when_every_checkpoint_is_damaged_nothing_starts_over_silently(tmp_path: Path) -> None:
    fit_until(tmp_path / "c", 10)
    for checkpoint in (tmp_path / "c").iterdir():
        flip(checkpoint / "tensors.safetensors")
    with pytest.raises(CorruptedArtefact, match="start afresh"):
        fit(tmp_path / "c")


def test_paths_that_hold_no_posterior(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "file", "empty"):
        with pytest.raises(StoreError, match=name):
            doxa.load(tmp_path / name)
    posterior = doxa.fit(mlp(), table(), steps=2)
    with pytest.raises(StoreError, match="file"):
        posterior.save(tmp_path / "file" / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        posterior.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_a_posterior_of_another_version_says_so(tmp_path: Path) -> None:
    from doxa.store import read_artefact, write_artefact

    doxa.fit(mlp(), table(), steps=2).save(tmp_path / "p")
    tensors, meta = read_artefact(tmp_path / "p")
    write_artefact(tmp_path / "p", tensors, meta | {"format": 999})
    with pytest.raises(StoreError, match="format 999"):
        doxa.load(tmp_path / "p")
    write_artefact(tmp_path / "p", tensors, meta | {"kind": "telepathic"})
    with pytest.raises(StoreError, match="telepathic"):
        doxa.load(tmp_path / "p")


NETS: dict[str, Callable[[], nn.Module]] = {
    "wider": lambda: doxa.nets.mlp(D, 1, hidden=(5,)),
    "deeper": lambda: doxa.nets.mlp(D, 1, hidden=(4, 4)),
    "other names": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(D, 4)), nn.Tanh(), nn.Linear(4, 1)
    ),
    "frozen": lambda: own().requires_grad_(False),
}


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("kind", NETS)
def test_loading_with_another_network_is_an_error(tmp_path: Path, kind: str) -> None:
    posterior = doxa.fit(own(), table(), "mean-field", steps=2)
    posterior.save(tmp_path / "p")
    with pytest.raises(ModelError, match="structure is not the saved one"):
        doxa.load(tmp_path / "p", net=NETS[kind]())
    with pytest.raises(ModelError, match=r"load\(path, net=\.\.\.\)"):
        doxa.load(tmp_path / "p")
    again = doxa.load(tmp_path / "p", net=own())
    x, _ = table()
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


def half_frozen(value: float) -> nn.Module:
    net = mlp()
    nn.init.constant_(net[0].bias, value).requires_grad_(False)
    return net


OTHERS: dict[str, dict[str, Any]] = {
    "data": {"data": (table()[0] + 1, table()[1])},
    "targets": {"data": (table()[0], table()[1] * 2)},
    "weights": {"sample_weight": torch.linspace(1, 2, N)},
    "method": {"method": "mean-field"},
    "seed": {"seed": 1},
    "members": {"members": 3},
    "steps": {"steps": STEPS + 1},
    "batch size": {"batch_size": 7},
    "rate": {"lr": 0.02},
    "schedule": {"schedule": "constant"},
    "optimiser": {"optimizer": "sgd"},
    "network": {"net": doxa.nets.mlp(D, 1, hidden=(5,))},
    "initial weights": {"init": "given"},
    "prior": {"prior": doxa.Normal(0.1)},
    "likelihood": {"likelihood": doxa.Gaussian(noise=0.1)},
    "runs": {"runs": doxa.Runs(seeds=[0, 1])},
    "validation": {"validation": 0.25},
    "standardisation": {"standardize": True},
    "precision": {"dtype": torch.float64},
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("left") / "c"
    fit_until(folder, 10)
    return folder


@pytest.mark.parametrize("other", OTHERS)
def test_the_checkpoint_of_another_fit_is_refused(left: Path, tmp_path: Path, other: str) -> None:
    shutil.copytree(left, tmp_path / "c")
    before = sorted(os.listdir(tmp_path / "c"))
    with pytest.raises(MethodError, match="belongs to another fit"):
        fit(tmp_path / "c", **OTHERS[other])
    assert sorted(os.listdir(tmp_path / "c")) == before


def test_the_weights_of_a_frozen_layer_count(tmp_path: Path) -> None:
    def press(done: int, _info: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "c", half_frozen(1.0), callbacks=[press])
    with pytest.raises(MethodError, match="belongs to another fit"):
        fit(tmp_path / "c", half_frozen(2.0))
    fit(tmp_path / "c", half_frozen(1.0))


def test_functions_as_schedules_resume(tmp_path: Path) -> None:
    """A lambda has another address in every process: what it returns is what counts."""

    def press(done: int, _info: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "c", schedule=lambda s: 1 - s, callbacks=[press])
    resumed = fit(tmp_path / "c", schedule=lambda s: 1.0 - s)
    alone = doxa.fit(mlp(), table(), steps=STEPS, members=2, schedule="linear")
    assert torch.equal(resumed.samples, alone.samples)
    with pytest.raises(MethodError, match="belongs to another fit"):
        fit(tmp_path / "c", schedule=lambda s: 1 - s / 2)


def test_artefacts_hold_no_code(tmp_path: Path) -> None:
    """Safetensors and strict JSON; a class can only be named, and only if it is registered."""
    doxa.fit(mlp(), table(), "mean-field", steps=2).save(tmp_path / "p")
    files = {"checksums.sha256", "meta.json", "tensors.safetensors"}
    assert set(os.listdir(tmp_path / "p")) == files
    json.loads((tmp_path / "p" / "meta.json").read_text())
    from doxa.store import read_artefact, write_artefact

    tensors, meta = read_artefact(tmp_path / "p")
    write_artefact(tmp_path / "p", tensors, meta | {"method": {"type": "os.system"}})
    with pytest.raises(StoreError, match=r"os\.system"):
        doxa.load(tmp_path / "p")


def test_two_fits_with_one_checkpoint(tmp_path: Path) -> None:
    """The second one, a thread's or a process's, is refused before its first step."""
    seen: list[str] = []

    def second(step: int, info: dict[str, Any]) -> None:
        with pytest.raises(FolderInUse, match=f"process {os.getpid()} .this one. on"):
            fit(tmp_path / "c", callbacks=[lambda *_: seen.append("stepped")])
        seen.append("refused")

    fit(tmp_path / "c", callbacks=[second])
    assert set(seen) == {"refused"}
    fit(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []  # no checkpoint was due, and no lock stays


def renumbered(checkpoint: Path, number: int | None) -> None:
    """The same checkpoint with another format number of its content, or with none."""
    tensors, meta = read_artefact(checkpoint)
    meta["meta"].pop("format")
    if number is not None:
        meta["meta"]["format"] = number
    shutil.rmtree(checkpoint)
    write_artefact(checkpoint, tensors, meta)


@pytest.mark.parametrize(
    "number, of", [(None, "format 0, of an earlier"), (0, "an earlier"), (99, "a later")]
)
def test_a_checkpoint_of_another_format_is_refused_and_left_as_it_was(
    tmp_path: Path, number: int | None, of: str
) -> None:
    """Every byte: also those of the older checkpoints, and of kept draws."""

    def sample(**options: Any) -> Any:
        method = doxa.SGLD(burn_in=4, draws=12)
        return doxa.fit(
            mlp(), table(), method, members=1, steps=None, checkpoint=tmp_path / "c",
            checkpoint_every=0, **options,
        )  # fmt: skip

    def press(done: int, _info: dict[str, Any]) -> None:
        if done >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(callbacks=[press])
    for checkpoint in (tmp_path / "c").glob("*-step-*"):
        renumbered(checkpoint, number)
    before = contents(tmp_path / "c")
    assert len(before) > 4
    with pytest.raises(StoreError, match=of) as caught:
        sample()
    assert "the version that began it" in str(caught.value)
    assert contents(tmp_path / "c") == before


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
