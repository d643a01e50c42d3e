"""The names of a state's entries: in one file, and never renamed, because checkpoints hold them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import doxa
from doxa.method import as_buffers, average_name, averaged, buffer_name, buffers_of, network_part

SOURCE = Path(doxa.__file__).parent
# Artefacts name their own tensors; `likelihood.*` are weights, not entries of a state.
OWNERS = {"method/state.py", "posterior/weights.py"}


def test_the_keys_are_those_of_earlier_checkpoints() -> None:
    assert buffer_name("0.running_mean") == "buffer.0.running_mean"
    assert average_name("theta") == average_name("theta", 0.25) == "average.theta"
    assert average_name("theta", 0.0) == "theta"


def test_buffers_go_into_a_state_and_back() -> None:
    buffers = {"0.running_mean": torch.zeros(2, 3), "spectral": torch.ones(2)}
    theta, layers = torch.ones(2, 5), torch.ones(2, 4)
    state = {"theta": theta, "layers": layers, "optim.m.theta": theta, **as_buffers(buffers)}
    assert buffers_of(state) == buffers
    assert network_part(state) == {"layers": layers, **as_buffers(buffers)}


def test_an_average_is_used_where_there_is_one() -> None:
    last, mean = torch.zeros(2, 5), torch.ones(2, 5)
    assert averaged({"theta": last}, "theta") is last
    assert averaged({"theta": last, average_name("theta"): mean}, "theta") is mean


def test_no_other_file_builds_these_keys() -> None:
    prefix = re.compile(r"""["'](buffer|average)\.""")
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if prefix.search(path.read_text(encoding="utf-8"))
    }
    assert found == OWNERS
