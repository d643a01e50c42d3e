"""Which fits may compute in half precision: what climbs, and not what must be exact."""

from __future__ import annotations

import torch

from doxa.errors import MethodError
from doxa.method.method import Method
from doxa.method.run import Run
from doxa.model.problem import Network


def in_half(precision: str, method: Method, run: Run) -> bool:
    """Of a precision that is not the full one: True, or an error where bfloat16 would be no
    approximation to be content with."""
    if precision != "bfloat16":
        raise MethodError(f"precision must be 'full' or 'bfloat16', not {precision!r}")
    if not method.half_precision or not isinstance(run.problem, Network):
        raise MethodError(
            f"{method.name} computes in full precision only: accept steps, curvature and kernels "
            "are lost in the three digits of bfloat16; leave precision= out"
        )
    if run.dtype != torch.float32:
        raise MethodError(
            f"precision='bfloat16' is mixed with float32, not {run.dtype}: give dtype=torch.float32"
        )
    return True
