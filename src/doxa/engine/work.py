"""How much work a call is, counted operation by operation. Nothing here looks at a clock: the same
call is the same work on an idle machine and on a busy one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


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
        if not func.is_view:
            self.operations += 1
            leaves = tree_flatten(out)[0]
            self.numbers += sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
            self.largest = max(self.largest, self._multiplications(func, args, kwargs or {}, out))
        return out

    def _multiplications(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        if func.overloadpacket in self._formulas:
            return self._formulas[func.overloadpacket](*args, **kwargs, out_val=out) / 2
        if "linalg" in func.name() or "cholesky" in func.name():
            return max((float(t.numel() * t.shape[-1]) for t in args if _is_square(t)), default=0.0)
        return 0.0


def _is_square(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[-1] == value.shape[-2]
