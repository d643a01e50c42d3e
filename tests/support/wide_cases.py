"""neural-tangents' numbers on infinitely wide networks, and the rows that they are of."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FILE = Path(__file__).parents[1] / "function" / "wide" / "peer_numbers.py"
_SPEC = importlib.util.spec_from_file_location("wide_peer_numbers", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
_peer: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_peer)

PEER = json.loads(_FILE.with_suffix(".json").read_text(encoding="utf-8"))
WEIGHT_STD, BIAS_STD = _peer.WEIGHT_STD, _peer.BIAS_STD
NOISE = _peer.NOISE_VARIANCE**0.5


def peer_data() -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in _peer.data().items()}
