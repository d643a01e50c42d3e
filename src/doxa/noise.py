"""Random numbers as a pure function of (seed, purpose, member, step).

`Noise` hashes a counter; there is no stream with a state. The i-th number of member m at step t is

    mix(mix(i + a) ^ b),   (a, b) = mixes of t, the call within the step, and a key of 96 bits

with `mix` a full-avalanche bijection of 32-bit words and the key a digest of seed, purpose and
member id. Nothing is checkpointed. The numbers do not depend on chunk size, engine, device, or on
the other members. The whole computation can be traced, compiled or captured in a CUDA graph. Two
streams are equal only if two digests are equal. Normals reach ±6.7.

`PrefetchedNoise` draws the random numbers of a stage on the CPU, for a block of steps at a time.
The counter hash can be captured in a graph, which a GPU needs, but it takes about forty small
operations; for a small network this is as much time as the gradient. Here each member fills a block
of steps with a generator seeded by (seed, stage, member, call, block). The numbers are still a pure
function of the step, so no random state is checkpointed and members do not depend on each other.
(The generator uses 32 bits of the seed: two of many thousand blocks may have the same numbers.)
Very long runs of small networks use the hash (`worthwhile`), because they are compiled, and a
compiler makes one loop of it.

A recorded step cannot draw random numbers itself: `listening` records the requests of a step, and
`giving` passes the numbers as arguments.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GOLDEN = 0x9E3779B9 - (1 << 32)
_ROW, _ROWS = 1 << 16, 1 << 20  # numbers of a row, and of all rows, that are drawn in blocks
_BLOCK = 1 << 16  # pairs of them in a block
_SMALL = 1 << 18  # largest size in bytes of a cached draw; 64 draws are cached, at most 16 MB


def digest(*parts: object) -> int:
    """A 128-bit integer from anything printable: seeds that differ in any part never collide."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def generator(*parts: object) -> torch.Generator:
    """A CPU generator for host-side draws (data order, initial weights)."""
    return torch.Generator().manual_seed(digest(*parts) & 0xFFFFFFFF)


class drawing(TorchDispatchMode):  # noqa: N801  (a context, like torch.no_grad)
    """A context in which torch draws random numbers from its own generator, seeded by `parts`. The
    numbers are those of the default generator with that seed.

    It is for code that takes no generator: `reset_parameters`, a constructor, a forward pass. The
    context belongs to its thread. The default generator is neither read nor changed, so threads do
    not affect each other. Operations inside a library's kernel that accept no generator (fused
    attention with dropout, cuDNN's recurrent layers) still use the default generator of a GPU.

    Parameters
    ----------
    parts : object
        The purpose of the draws, as in `digest`.

    Attributes
    ----------
    drew : bool
        Whether random numbers were drawn in this context.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__()
        self.drew = False
        self._seed = digest(*parts) & 0xFFFFFFFF
        self._generators: dict[torch.device, torch.Generator] = {}

    def from_here(self) -> drawing:
        """A context that draws the numbers which this one would draw next."""
        new = drawing()
        new._seed = self._seed
        new._generators = {d: own.clone_state() for d, own in self._generators.items()}
        return new

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would load its compiler for the first operation of a context, to exclude this class
        from compilation: 70 MiB, and a second. `__torch_dispatch__` excludes itself, if the
        compiler is loaded."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "torch._dynamo" in sys.modules:
            return _uncompiled(drawing._dispatch)(self, func, args, kwargs or {})
        return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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
def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _with_generator(func: Any) -> Any:
    """The overload of an operation that takes a generator; None if there is none."""
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
    """Fused dropout, which takes no generator: the output and the mask of kept entries."""
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


def _mix_(h: Tensor, t: Tensor) -> Tensor:
    """`_mix` in place, with another tensor for temporary values."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, None)):
        torch.bitwise_right_shift(h, shift, out=t)
        h.bitwise_xor_(t.bitwise_and_((1 << (32 - shift)) - 1))
        if factor is not None:
            h.mul_(factor)
    return h


class Noise:
    """Standard normals and uniforms for a list of members.

    Parameters
    ----------
    seed : int
        The seed.
    purpose : str
        The purpose of the numbers; different purposes are independent.
    members : sequence
        Global ids, one per row; the numbers of a member depend only on its own id.
    device : torch.device
        The device of the numbers.
    dtype : torch.dtype
        The floating-point type of the numbers.
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
        """Numbers for k particles per member, each with its own key."""
        return self._derived(k, [f"{member}/{j}" for member in self.members for j in range(k)])

    def _derived(self, key: object, members: Sequence[object]) -> Noise:
        """A derived source, cached: a captured step must not send keys to a GPU."""
        if key not in self._sources:
            new = Noise(self.seed, self.purpose, members, self.device, self.dtype)
            self._sources[key] = new
        return self._sources[key]

    def _counter(self, size: int) -> Tensor:
        if size not in self._counters:
            self._counters[size] = torch.arange(size, dtype=torch.int32, device=self.device)
        return self._counters[size]

    def uniform(self, shape: Sequence[int], step: Tensor | int = 0, call: int = 0) -> Tensor:
        """Uniforms [M, *shape] in (0, 1]; for several steps [T] at once, [T, M, *shape]."""
        return self._hashed(shape, *self.keys(step, call))

    def uniform_at(self, places: Tensor, call: int = 0) -> Tensor:
        """Uniforms [M, N] in (0, 1] at given places, int64 [N]: those of `uniform` at step 0 for
        places below 2³¹; more places continue with the next steps."""
        high, low = places >> 31, (places & 0x7FFFFFFF).to(torch.int32)
        if len(places) and int(high.min()) != int(high.max()):
            found = torch.empty(len(self.members), len(places), dtype=self.dtype)
            for step in high.unique().tolist():
                here = high == step
                found[:, here] = self.uniform_at(places[here], call).cpu()
            return found.to(self.device)
        a, b = (key.unsqueeze(-1) for key in self.keys(int(high[:1].sum()), call))
        bits = _mix(_mix(low.to(self.device) + a) ^ b)
        u = (bits.to(self.dtype) + 2147483648.5) * 2.0**-32
        return u.clamp_min(2.0**-33)

    def keys(self, step: Tensor | int, call: int) -> tuple[Tensor, Tensor]:
        """(a, b) of the counter hash: [M] each; for several steps [T], [T, M]."""
        if isinstance(step, int):
            step = torch.tensor(step, dtype=torch.int32, device=self.device)
        base, key, last = self._keys.unbind(1)
        now = step.to(torch.int32).unsqueeze(-1) if step.ndim else step.to(torch.int32)
        a = _mix(_mix(base + now) ^ (key + _signed(call * _GOLDEN)))
        return a, _mix(a ^ last)

    def signs(self, shape: Sequence[int], step: Tensor | int = 0, call: int = 0) -> Tensor:
        """±1, [M, *shape], 32 of them from each word of the hash; for several steps [T] at once,
        [T, M, *shape]."""
        size = math.prod(shape)
        words = self._words(-(-size // 32), *self.keys(step, call))
        each = (words.unsqueeze(-1) >> self._counter(32)) & 1  # [..., words, 32]
        signs = (1 - 2 * each).flatten(-2)[..., :size].to(self.dtype)
        return signs.reshape(*words.shape[:-1], *shape)

    def _words(self, count: int, a: Tensor, b: Tensor) -> Tensor:
        """[M, count] words of 32 bits."""
        return _mix(_mix(self._counter(count) + a.unsqueeze(-1)) ^ b.unsqueeze(-1))

    def _hashed(self, shape: Sequence[int], a: Tensor, b: Tensor) -> Tensor:
        bits = self._words(math.prod(shape), a, b)
        u = (bits.to(self.dtype) + 2147483648.5) * 2.0**-32
        u = u.clamp_min(2.0**-33)  # in single precision the lowest 65 words round to 0: log u
        return u.reshape(*a.shape, *shape)

    def rowwise(self, kind: str, shape: Sequence[int], step: Tensor | int, call: int) -> Tensor:
        """[M, rows, ...]: the numbers of a row do not depend on the number of rows after it."""
        return self.rows(kind, shape, *self.keys(step, call))

    def rows(self, kind: str, shape: Sequence[int], a: Tensor, b: Tensor) -> Tensor:
        """The same, from the keys of a step."""
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
        """[M, *shape] standard normals, in pairs by Box and Muller; for several steps [T] at once,
        [T, M, *shape]."""
        size = math.prod(shape)
        half = (size + 1) // 2
        if (
            size >= _ROW
            and size * len(self.members) >= _ROWS
            and self.device.type == "cpu"
            and not (isinstance(step, Tensor) and step.ndim)
        ):
            return self._row_of_normals(size, half, *self.keys(step, call)).unflatten(1, shape)
        u = self.uniform((2 * half,), step, call)
        z = _normals(u[..., :half], u[..., half:])
        return z[..., :size].reshape(*u.shape[:-1], *shape)

    def _row_of_normals(self, size: int, half: int, a: Tensor, b: Tensor) -> Tensor:
        """[M, size] normals, in blocks that stay in the cache: nothing else has the size of a
        row."""
        z = torch.empty(len(a), size, dtype=self.dtype)
        step = min(half, _BLOCK)
        counter = torch.arange(step, dtype=torch.int32)
        words, more = torch.empty_like(counter), torch.empty_like(counter)
        u, v, other = (torch.empty(step, dtype=self.dtype) for _ in range(3))

        def uniforms(first: int, count: int, m: int, out: Tensor) -> Tensor:
            h, t = words[:count], more[:count]
            torch.add(counter[:count], a[m] + first, out=h)
            _mix_(h, t).bitwise_xor_(b[m])
            out = out[:count].copy_(_mix_(h, t))
            return out.add_(2147483648.5).mul_(2.0**-32).clamp_min_(2.0**-33)

        for m in range(len(a)):
            for first in range(0, half, step):
                count = min(step, half - first)
                radius = uniforms(first, count, m, u).log_().mul_(-2.0).sqrt_()
                angle = uniforms(half + first, count, m, v).mul_(2.0 * math.pi)
                torch.mul(
                    radius, torch.cos(angle, out=other[:count]), out=z[m, first : first + count]
                )
                last = min(count, size - half - first)
                torch.mul(radius[:last], angle[:last].sin_(), out=z[m, half + first :][:last])
        return z


def _in_order(row: Tensor) -> Callable[[int], Tensor]:
    """The parts of a row, one after the other, of given lengths."""
    at = 0

    def following(count: int) -> Tensor:
        nonlocal at
        at += count
        return row[at - count : at]

    return following


def _normals(u: Tensor, v: Tensor) -> Tensor:
    """Normals from two tensors of uniforms (Box & Muller), twice as many along the last axis."""
    radius = (-2.0 * u.log()).sqrt()
    angle = v * (2.0 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)


def repeated(
    kind: str, seed: int, purpose: str, members: Sequence[str], shape: Sequence[int],
    device: torch.device, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The first draw of such a `Noise`, "normal" or "uniform", [M, *shape]. It must not be
    overwritten.

    Predictions of a posterior use the same numbers in each call, so the last small draws are cached
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
@torch.inference_mode(False)  # the draw is cached, and later callers may differentiate
def _kept(*asked: Any) -> Tensor:
    return _drawn(*asked)


_STEPS = 64  # steps in a block, at most
_NUMBERS = 1 << 14  # numbers in a member's block, if one step needs fewer
_LONG = 10_000  # steps from which the step of a small network is likely to be compiled
_LARGE = 1 << 17  # weights of all members from which drawing ahead is faster in any case
_MANY = 1 << 14  # alternating numbers from which a draw is used for eight steps, not two
_WINDOWS = 4  # positions in a row at which these steps start to read


def worthwhile(weights: int, steps: int) -> bool:
    """Whether the numbers of a stage are drawn ahead. The rule depends on the amount of work only,
    so that a run has the same numbers in all modes of execution."""
    return steps < _LONG or weights >= _LARGE


class Request(NamedTuple):
    """A request of a step: the source of its members, the distribution, the shape, and the call."""

    source: tuple[object, ...]
    kind: str
    shape: tuple[int, ...]
    call: int


class Alternating(NamedTuple):
    """The numbers of `alternating` for a row of each member, without a copy for each step: the
    numbers of a row, from a position on and then from its beginning, times a sign. The row is
    overwritten in a later step."""

    numbers: Tensor  # [M, P]
    first: int = 0
    sign: float = 1.0

    def columns(self, member: int, start: int, stop: int) -> Tensor:
        """The numbers of some columns of a member, without the sign."""
        row = self.numbers[member]
        start, stop = start + self.first, stop + self.first
        if stop <= len(row):
            return row[start:stop]
        if start >= len(row):
            return row[start - len(row) : stop - len(row)]
        return torch.cat([row[start:], row[: stop - len(row)]])


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
        self._rows: dict[tuple[int, int], tuple[int, Tensor]] = {}  # drawn in the block of a step
        self._generator = torch.Generator()
        self._asked: dict[Request, None] | None = None
        self._given: Mapping[Request, Tensor] | None = None
        self._root._sources[path] = self

    def normal(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] standard normals."""
        return self._number("normal", shape, step, call)

    def alternating(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] standard normals; at an odd step, minus those of the step before. Drawing
        many of them takes longer than using them. So the next three pairs of steps use the same
        numbers, each shifted by a quarter of a row: at each position they are still normal, and
        uncorrelated between pairs of steps."""
        return self._number("alternating", shape, step, call)

    def alternating_row(self, size: int, step: Tensor, call: int = 0) -> Alternating:
        """The same numbers as `alternating` of one axis, for steps that read them in blocks."""
        if size < _MANY:
            return Alternating(self.alternating((size,), step, call))
        noise, stride = self.noise, size // _WINDOWS // 16 * 16
        turn, phase = divmod(int(step), 2 * _WINDOWS)
        held = self._rows.get((size, call))
        if held is None:
            row = torch.empty(len(noise.members), size, device=self.device, dtype=self.dtype)
            held = self._rows[size, call] = -1, row
        if held[0] != turn:
            for m in range(len(noise.members)):
                self._seed(m, call, turn)
                held[1][m].normal_(generator=self._generator)
            self._rows[size, call] = turn, held[1]
        return Alternating(held[1], phase // 2 * stride, -1.0 if phase % 2 else 1.0)

    def uniform(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] in (0, 1]."""
        return self._number("uniform", shape, step, call)

    def rowwise(self, kind: str, shape: Sequence[int], step: Tensor, call: int) -> Tensor:
        """Noise per row uses the hash, so that the numbers of a row do not depend on the number of
        rows after it. The keys of the hash are computed ahead, which saves half of its
        operations."""
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
        """The numbers of a request, as a function of the step."""
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
        """Both signs are stored, and each row is continued with its beginning, so that a step
        copies nothing."""
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
        for m in range(len(members)):
            self._seed(m, request.call, block)
            if request.kind != "uniform":
                numbers[m].normal_(generator=self._generator)
            else:
                numbers[m].uniform_(generator=self._generator)
        if request.kind == "uniform":
            numbers = numbers.neg_().add_(1.0)  # (0, 1] in place of [0, 1)
        return numbers.transpose(0, 1).contiguous()

    def _seed(self, member: int, call: int, block: int) -> None:
        """Begin the numbers of a member for a call in a block of steps."""
        name = ("ahead", self.noise.seed, self.noise.purpose, self.noise.members[member], call)
        self._generator.manual_seed(digest(*name, block) & 0xFFFFFFFF)

    def stream(self, member: int, size: int, step: Tensor, call: int) -> Callable[[int], Tensor]:
        """The numbers of a row, `normal((size,), step, call)[member]`, in order: a function of how
        many are next. The row has no memory of its own."""
        if size < _NUMBERS:
            return _in_order(self.normal((size,), step, call)[member])
        noise, source = self.noise, torch.Generator()
        name = ("ahead", noise.seed, noise.purpose, noise.members[member], call, int(step))
        source.manual_seed(digest(*name) & 0xFFFFFFFF)
        buffer = torch.empty(_NUMBERS + 16, device=self.device, dtype=self.dtype)
        drawn, held = 0, buffer[:0]

        def following(count: int) -> Tensor:
            nonlocal drawn, held
            out, done = torch.empty(count, device=self.device, dtype=self.dtype), 0
            if not len(held) and count % 16 == 0 and drawn + count + 16 <= size:
                drawn += count
                return out.normal_(generator=source)
            while done < count:
                if not len(held):
                    # `normal_` makes sixteen numbers at a time, and the last sixteen of a row anew.
                    rest = size - drawn
                    held = buffer[: rest if rest < _NUMBERS + 16 else _NUMBERS]
                    held.normal_(generator=source)
                    drawn += len(held)
                some = min(count - done, len(held))
                out[done : done + some] = held[:some]
                held, done = held[some:], done + some
            return out

        return following

    @contextmanager
    def listening(self) -> Iterator[dict[Request, None]]:
        """Record all requests."""
        self._asked = {}
        try:
            yield self._asked
        finally:
            self._asked = None

    @contextmanager
    def giving(self, numbers: Mapping[Request, Tensor]) -> Iterator[None]:
        """Return only these numbers for requests."""
        self._given = numbers
        try:
            yield
        finally:
            self._given = None
