"""Random numbers as a pure function of (seed, purpose, member, step).

A counter is hashed, not a stream advanced: the i-th number of member m at step t is

    mix(mix(i + a) ^ b),   (a, b) = mixes of t, the call within the step, and a key of 96 bits

with `mix` a full-avalanche bijection of 32-bit words and the key a digest of seed, purpose and
member id. Nothing is checkpointed, nothing depends on chunk size, engine, device or on which other
members run, and the whole computation can be traced, compiled or captured in a CUDA graph. Two
streams coincide only if two digests do, and normals reach ±6.7.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GOLDEN = 0x9E3779B9 - (1 << 32)
_SMALL = 1 << 18  # bytes of a draw that is kept, of 64: at most 16 MB


def digest(*parts: object) -> int:
    """A 128-bit integer from anything printable: seeds that differ in any part never collide."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def generator(*parts: object) -> torch.Generator:
    """A CPU generator for host-side draws (data order, initial weights)."""
    return torch.Generator().manual_seed(digest(*parts) & 0xFFFFFFFF)


class drawing(TorchDispatchMode):  # noqa: N801  (a context, like torch.no_grad)
    """Within it, what torch draws without a generator comes from one of this context's own, seeded
    by `parts`: the numbers that the default generator would give after that seed.

    For code that takes no generator: `reset_parameters`, a constructor, a forward pass. The context
    belongs to its thread. The default generator is neither read nor moved, so threads do not see
    each other's draws. Operations inside a library's kernel that accept no generator (fused
    attention with dropout, cuDNN's recurrent layers) still draw from the default one of a GPU.

    Parameters
    ----------
    parts: what the draws are for, as in `digest`.

    Attributes
    ----------
    drew: whether anything was drawn so far.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__()
        self.drew = False
        self._seed = digest(*parts) & 0xFFFFFFFF
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.drew = True
        like = next((a for a in args if isinstance(a, Tensor)), None)
        device = torch.device(kwargs.get("device") or "cpu") if like is None else like.device
        if device.type == "meta":  # shapes without numbers
            return func(*args, **kwargs)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        own = self._generators[device]
        if func is torch.ops.aten.native_dropout.default:
            return _dropout(*args, generator=own)
        accepting = _with_generator(func)
        if accepting is None:
            return func(*args, **kwargs)
        return accepting(*args, **{**kwargs, "generator": own})


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _with_generator(func: Any) -> Any:
    """The overload of an operation that takes a generator, itself or another; None if none does."""
    names = [a.name for a in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func.overloadpacket
    for other in (getattr(packet, name) for name in packet.overloads()):
        own = [a.name for a in other._schema.arguments]
        if "generator" in own and [n for n in own if n != "generator"] == names:
            return other
    return None


def _dropout(
    x: Tensor, p: float, train: bool | None, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Fused dropout, which takes no generator: the output and what is kept."""
    p = 0.0 if train is False else p
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - p, generator=generator)
    return x * kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _mix(h: Tensor) -> Tensor:
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * 0x7FEB352D
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * (0x846CA68B - (1 << 32))
    return h ^ ((h >> 16) & 0xFFFF)


class Noise:
    """Standard normals and uniforms for a list of members.

    Parameters
    ----------
    seed, purpose: what the numbers are for; different purposes are independent.
    members: global ids, one a row; a member's numbers depend on its own id only.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        members: Sequence[object],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.seed, self.purpose, self.members = seed, purpose, list(members)
        keys = (digest("noise", seed, purpose, member) for member in members)
        words = [[_signed(key >> shift) for shift in (0, 32, 64)] for key in keys]
        self._keys = torch.tensor(words, dtype=torch.int32, device=device).reshape(-1, 3)
        self.device = torch.device(device)
        self.dtype = dtype
        self._counters: dict[int, Tensor] = {}
        self._sources: dict[object, Noise] = {}

    def part(self, members: slice) -> Noise:
        """The numbers of some of the members."""
        return self._derived((members.start, members.stop), self.members[members])

    def times(self, k: int) -> Noise:
        """Numbers for k particles of every member, each with a key of its own."""
        return self._derived(k, [f"{member}/{j}" for member in self.members for j in range(k)])

    def _derived(self, key: object, members: Sequence[object]) -> Noise:
        """Made once: a step that is captured must not send keys to a GPU."""
        if key not in self._sources:
            new = Noise(self.seed, self.purpose, members, self.device, self.dtype)
            self._sources[key] = new
        return self._sources[key]

    def _counter(self, size: int) -> Tensor:
        if size not in self._counters:
            self._counters[size] = torch.arange(size, dtype=torch.int32, device=self.device)
        return self._counters[size]

    def uniform(self, shape: Sequence[int], step: Tensor | int = 0, call: int = 0) -> Tensor:
        """[M, *shape] in (0, 1]; of several steps [T] at once, [T, M, *shape]."""
        return self._hashed(shape, *self.keys(step, call))

    def keys(self, step: Tensor | int, call: int) -> tuple[Tensor, Tensor]:
        """(a, b), with which counters are hashed: [M] each; of several steps [T], [T, M]."""
        if isinstance(step, int):
            step = torch.tensor(step, dtype=torch.int32, device=self.device)
        base, key, last = self._keys.unbind(1)
        now = step.to(torch.int32).unsqueeze(-1) if step.ndim else step.to(torch.int32)
        a = _mix(_mix(base + now) ^ (key + _signed(call * _GOLDEN)))
        return a, _mix(a ^ last)

    def _hashed(self, shape: Sequence[int], a: Tensor, b: Tensor) -> Tensor:
        counter = self._counter(math.prod(shape))
        bits = _mix(_mix(counter + a.unsqueeze(-1)) ^ b.unsqueeze(-1))  # [M, size]
        u = (bits.to(self.dtype) + 2147483648.5) * 2.0**-32
        u = u.clamp_min(2.0**-33)  # in single precision the lowest 65 words round to 0: log u
        return u.reshape(*a.shape, *shape)

    def rowwise(self, kind: str, shape: Sequence[int], step: Tensor | int, call: int) -> Tensor:
        """[M, rows, ...]: a row's numbers do not depend on how many rows come after it."""
        return self.rows(kind, shape, *self.keys(step, call))

    def rows(self, kind: str, shape: Sequence[int], a: Tensor, b: Tensor) -> Tensor:
        """The same, of the keys of a step."""
        if kind == "uniform":
            return self._hashed(shape, a, b)
        rows, size = shape[0], math.prod(shape[1:])
        half = (size + 1) // 2
        u = self._hashed((rows, 2, half), a, b)
        z = _normals(u[..., 0, :], u[..., 1, :])
        return z[..., :size].reshape(*z.shape[:-2], *shape)

    def alternating(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] standard normals; at an odd step minus those of the step before."""
        sign = 1 - 2 * (step % 2)
        return self.normal(shape, step // 2, call) * sign.to(self.dtype)

    def normal(self, shape: Sequence[int], step: Tensor | int = 0, call: int = 0) -> Tensor:
        """[M, *shape] standard normals, by Box and Muller in pairs; of several steps [T] at once,
        [T, M, *shape]."""
        size = math.prod(shape)
        half = (size + 1) // 2
        u = self.uniform((2 * half,), step, call)
        z = _normals(u[..., :half], u[..., half:])
        return z[..., :size].reshape(*u.shape[:-1], *shape)


def _normals(u: Tensor, v: Tensor) -> Tensor:
    """Twice as many normals as either has uniforms (Box & Muller), side by side."""
    radius = (-2.0 * u.log()).sqrt()
    angle = v * (2.0 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)


def repeated(
    kind: str, seed: int, purpose: str, members: Sequence[str], shape: Sequence[int],
    device: torch.device, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """What such a `Noise` draws first, "normal" or "uniform", [M, *shape]; not to be written to.

    Predictions of a posterior ask for the same numbers in every call: the last small draws are kept
    in this process.
    """
    asked = (kind, seed, purpose, tuple(members), tuple(shape), device, dtype)
    small = len(members) * math.prod(shape) * dtype.itemsize <= _SMALL
    return _kept(*asked) if small else _drawn(*asked)


def _drawn(
    kind: str, seed: int, purpose: str, members: tuple[str, ...], shape: tuple[int, ...],
    device: torch.device, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    noise = Noise(seed, purpose, members, device, dtype)
    return noise.normal(shape) if kind == "normal" else noise.uniform(shape)


@lru_cache(64)
@torch.inference_mode(False)  # whoever asks first: others may differentiate
def _kept(*asked: Any) -> Tensor:
    return _drawn(*asked)
