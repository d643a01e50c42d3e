"""One writer per folder: the kernel's lock, seen by real processes and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from doxa.errors import FolderInUse, StoreError
from doxa.store import exclusive, read_artefact, write_artefact

HOLDER = """
import sys, time
from doxa.store import exclusive
with exclusive(sys.argv[1]):
    print("held", flush=True)
    if len(sys.argv) > 2:  # a forked child that stays behind
        import os
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    time.sleep(60)
"""


@contextmanager
def holder(path: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLDER, str(path), *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_second_process_is_told_who_holds_it_and_a_killed_one_blocks_nobody(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    with holder(path, "fork") as process:
        with pytest.raises(FolderInUse, match=rf"process {process.pid} on .* since '20\d\d-"):
            exclusive(path).__enter__()
        (tmp_path / "link").symlink_to(path)
        with pytest.raises(FolderInUse):  # by another name
            exclusive(tmp_path / "link").__enter__()
        write_artefact(path, {"a": torch.ones(2)}, {"n": 1})  # the folder is replaced ...
        write_artefact(path, {"a": torch.ones(2)}, {"n": 2})
        assert read_artefact(path)[1] == {"n": 2}  # ... and read,
        with pytest.raises(FolderInUse):  # and held all the same
            exclusive(path).__enter__()
        process.send_signal(signal.SIGKILL)  # its child lives on
        process.wait()
        assert (tmp_path / ".run.lock").exists()
        with exclusive(path):
            pass
    assert not (tmp_path / ".run.lock").exists()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    inside, most, refused = [0], [0], [0]
    own = threading.Lock()
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(200):
            try:
                with exclusive(tmp_path / "run"):
                    with own:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                    with own:
                        inside[0] -= 1
            except FolderInUse:
                refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert refused[0] > 0
    with exclusive(tmp_path / "run"), pytest.raises(FolderInUse, match=f"{os.getpid()} .this one"):
        exclusive(tmp_path / "run").__enter__()


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    with exclusive(tmp_path / "new" / "er" / "run"):
        assert (tmp_path / "new" / "er" / ".run.lock").exists()
    assert list(tmp_path.iterdir()) == []
    with exclusive(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run").mkdir()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "[" * 5000, '{"pid": 1}', "\x00"])
def test_what_a_stale_file_says_does_not_matter(tmp_path: Path, text: str) -> None:
    (tmp_path / ".run.lock").write_text(text)
    with exclusive(tmp_path / "run"):
        (tmp_path / ".run.lock").write_text(text)
        with pytest.raises(FolderInUse, match="another process"):
            exclusive(tmp_path / "run").__enter__()


def test_links_and_pipes_in_its_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    (tmp_path / ".run.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(StoreError, match="is a link"):
        exclusive(tmp_path / "run").__enter__()
    assert (tmp_path / "mine").read_text() == "keep"
    os.mkfifo(tmp_path / ".other.lock")
    with pytest.raises(StoreError, match="not a regular file"):
        exclusive(tmp_path / "other").__enter__()


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    with exclusive(path), pytest.raises(FolderInUse):
        exclusive(path).__enter__()
    for n in range(2):
        write_artefact(path, {}, {"n": n})
    assert read_artefact(path)[1] == {"n": 1}
    assert [place.name for place in tmp_path.iterdir()] == [path.name]
