"""How much work a call is, counted operation by operation. Nothing here looks at a clock: the same
call is the same work on an idle machine and on a busy one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# The operand whose last axis a matrix product sums over.
_SUMMED = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}


class Count(TorchDispatchMode):
    """Counts what runs inside it: operations, the numbers they write, and the multiplications of
    the largest matrix product, convolution or factorisation."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.operations, self.numbers, self.largest = 0, 0, 0.0
        self._formulas = flop_registry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        self.operations += 1
        for leaf in out if isinstance(out, list | tuple) else (out,):
            self.numbers += leaf.numel() if isinstance(leaf, Tensor) else 0
        packet = func.overloadpacket
        if packet in _SUMMED:
            self.largest = max(self.largest, float(out.numel() * args[_SUMMED[packet]].shape[-1]))
        elif packet in self._formulas:
            formula = self._formulas[packet]
            self.largest = max(self.largest, formula(*args, **(kwargs or {}), out_val=out) / 2)
        elif "linalg" in func._name or "cholesky" in func._name:
            matrices = (t for t in args if isinstance(t, Tensor) and t.ndim > 1)
            square = (t for t in matrices if t.shape[-1] == t.shape[-2])
            self.largest = max(self.largest, *(float(t.numel() * t.shape[-1]) for t in square), 0.0)
        return out
