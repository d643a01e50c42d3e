"""Random numbers as a pure function of (seed, purpose, member, step).

A counter is hashed, not a stream advanced: the i-th number of member m at step t is

    mix(mix(i + a) ^ b),   (a, b) = mixes of t, the call within the step, and a key of 96 bits

with `mix` a full-avalanche bijection of 32-bit words and the key a digest of seed, purpose and
member id. Nothing is checkpointed, nothing depends on chunk size, engine, device or on which other
members run, and the whole computation can be traced, compiled or captured in a CUDA graph. Two
streams coincide only if two digests do, and normals reach ±6.7.

Random numbers of a stage's steps on the CPU, drawn some steps ahead by the machine's generator.

The counter hash of `doxa.noise` can be captured in a graph, which a GPU needs, but is some forty
small operations: beside the step of a small network that is as much as the gradient itself. Here
each member fills a block of the next steps' numbers with a generator seeded by (seed, stage,
member, call, block): still a pure function of the step, so that nothing random is checkpointed and
no member depends on which others run. (The generator takes 32 bits of the seed: two of many
thousand blocks may hold the same numbers.)

Very long runs of small networks use the hash after all (`worthwhile`): they are compiled, and a
compiler makes one loop of it.

A recorded step cannot draw for itself: `listening` notes what a step asks for, and `giving` hands
those numbers in as arguments.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

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

    def select_members(self, members: slice) -> Noise:
        """The numbers of some of the members."""
        return self._derived((members.start, members.stop), self.members[members])

    def expand_particles(self, k: int) -> Noise:
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


_STEPS = 64  # in a block at most
_NUMBERS = 1 << 14  # in a member's block, where one step needs fewer
_LONG = 10_000  # steps from which a small network's step is likely to be compiled
_LARGE = 1 << 17  # weights of all members from which drawing is faster all the same
_MANY = 1 << 14  # alternating numbers from which a draw serves eight steps, not two
_WINDOWS = 4  # places in a row where these steps begin to read it


def worthwhile(weights: int, steps: int) -> bool:
    """Whether a stage's numbers are drawn ahead: a rule about the work, so that the same run sees
    the same numbers however its steps are executed."""
    return steps < _LONG or weights >= _LARGE


class Request(NamedTuple):
    """What a step asks for: which members' source, the distribution, the shape, which call."""

    source: tuple[object, ...]
    kind: str
    shape: tuple[int, ...]
    call: int


class PrefetchedNoise:
    """The numbers of a stage's steps, with the interface of `Noise`."""

    def __init__(
        self, noise: Noise, path: tuple[object, ...] = (), root: PrefetchedNoise | None = None
    ) -> None:
        self.noise, self.path = noise, path
        self.device, self.dtype = noise.device, noise.dtype
        self._root = self if root is None else root
        self._sources: dict[tuple[object, ...], PrefetchedNoise] = {}
        self._readers: dict[Request, Callable[[int], Tensor]] = {}
        self._generator = torch.Generator()
        self._asked: dict[Request, None] | None = None
        self._given: Mapping[Request, Tensor] | None = None
        self._root._sources[path] = self

    def normal(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] standard normals."""
        return self._number("normal", shape, step, call)

    def alternating(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] standard normals; at an odd step minus those of the step before. Drawing many
        of them takes longer than all that is done with them, so that three more pairs of steps have
        the same numbers, each a quarter of a row further on: a place's are still normal, and
        uncorrelated over pairs of steps."""
        return self._number("alternating", shape, step, call)

    def uniform(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] in (0, 1]."""
        return self._number("uniform", shape, step, call)

    def rowwise(self, kind: str, shape: Sequence[int], step: Tensor, call: int) -> Tensor:
        """Noise a row is hashed: a row's numbers do not depend on how many rows come after it. What
        it is hashed with is found ahead: half of the hash's operations, however few the rows."""
        return self.noise.rows(kind, shape, *self._number("keys", (2,), step, call).unbind(-1))

    def select_members(self, members: slice) -> PrefetchedNoise:
        path = (*self.path, (members.start, members.stop))
        known = self._root._sources.get(path)
        return known or PrefetchedNoise(self.noise.select_members(members), path, self._root)

    def expand_particles(self, k: int) -> PrefetchedNoise:
        path = (*self.path, k)
        known = self._root._sources.get(path)
        return known or PrefetchedNoise(self.noise.expand_particles(k), path, self._root)

    def _number(self, kind: str, shape: Sequence[int], step: Tensor, call: int) -> Tensor:
        request, root = Request(self.path, kind, tuple(shape), call), self._root
        if root._given is not None:
            return root._given[request]
        if root._asked is not None:
            root._asked[request] = None
        if request not in self._readers:
            self._readers[request] = self.reader(request)
        return self._readers[request](int(step))

    def reader(self, request: Request) -> Callable[[int], Tensor]:
        """What a request gets at a step, as a function of the step."""
        source, size = self._root._sources[request.source], math.prod(request.shape)
        length = max(1, min(_STEPS, _NUMBERS // max(1, size)))
        if request.kind == "alternating":
            return source._alternating(request, length)
        held: tuple[int, tuple[Tensor, ...]] = (-1, ())

        def read(step: int) -> Tensor:
            nonlocal held
            block, place = divmod(step, length)
            if held[0] != block:
                held = block, source._filled(request, block, length).unbind(0)
            return held[1][place]

        return read

    def _alternating(self, request: Request, length: int) -> Callable[[int], Tensor]:
        """Both signs are held, and a row goes on where it began: a step copies nothing."""
        row = request.shape[-1]
        many = row >= _MANY
        windows = _WINDOWS if many else 1
        stride = row // _WINDOWS // 16 * 16  # what is read begins where a vector does
        held: tuple[int, tuple[tuple[Tensor, ...], ...]] = (-1, ())

        def read(step: int) -> Tensor:
            nonlocal held
            turn, phase = divmod(step, 2 * windows)
            block, place = divmod(turn, length)
            if held[0] != block:
                numbers = self._filled(request, block, length)
                if many:
                    again = numbers[..., : (windows - 1) * stride]
                    numbers = torch.cat([numbers, again], -1)
                held = block, (numbers.unbind(0), (-numbers).unbind(0))
            numbers = held[1][phase % 2][place]
            return numbers.narrow(-1, phase // 2 * stride, row) if many else numbers

        return read

    def _filled(self, request: Request, block: int, length: int) -> Tensor:
        """[length, M, *shape]."""
        members, noise = self.noise.members, self.noise
        if request.kind == "keys":
            steps = torch.arange(block * length, (block + 1) * length, device=self.device)
            return torch.stack(noise.keys(steps, request.call), -1)
        size = (len(members), length, *request.shape)
        numbers = torch.empty(size, device=self.device, dtype=self.dtype)
        for m, member in enumerate(members):
            name = ("ahead", noise.seed, noise.purpose, member, request.call, block)
            self._generator.manual_seed(digest(*name) & 0xFFFFFFFF)
            if request.kind != "uniform":
                numbers[m].normal_(generator=self._generator)
            else:
                numbers[m].uniform_(generator=self._generator)
        if request.kind == "uniform":
            numbers = numbers.neg_().add_(1.0)  # (0, 1] in place of [0, 1)
        return numbers.transpose(0, 1).contiguous()

    @contextmanager
    def listening(self) -> Iterator[dict[Request, None]]:
        """Note what is asked for."""
        self._asked = {}
        try:
            yield self._asked
        finally:
            self._asked = None

    @contextmanager
    def giving(self, numbers: Mapping[Request, Tensor]) -> Iterator[None]:
        """Answer from these, and from nothing else."""
        self._given = numbers
        try:
            yield
        finally:
            self._given = None
