"""Which weights are sampled, where a method is asked to sample only some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.method import Run


def uncertain(run: Run) -> Tensor | None:
    """1 for every weight that is sampled, 0 for the others, [P]; None where all are. Noise of the
    likelihood is always sampled."""
    if run.model is None or run.model.subset == "all":
        return None
    fixed = set(run.layout.names) - set(run.model.subset_names)
    fixed = {name for name in fixed if not name.startswith("likelihood.")}
    free = torch.ones(run.layout.size, device=run.device, dtype=run.dtype)
    free[run.layout.index(fixed).to(run.device)] = 0.0
    return free
