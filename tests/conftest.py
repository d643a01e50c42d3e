"""What holds for every test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_networks_in_any_order() -> None:
    """Tests build networks with torch's global generator: their weights do not depend on which
    other tests ran before in the process."""
    torch.manual_seed(0)
