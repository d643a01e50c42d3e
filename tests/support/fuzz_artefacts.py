"""Mutated artefacts with right checksums, read in a process of its own with little memory.

    python fuzz_artefacts.py CASES SEED FOLDER

Each case is a small saved posterior, draws of a log density or a checkpoint in which something was
changed: JSON values by a grammar of their types, headers and numbers of tensors, bytes, lengths,
kinds of file. It must be refused with an error of `doxa.errors`, or answer with finite numbers; the
mapped reader must say what the library that defines the format says. What happened comes back as
JSON, with where each failure was raised.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import artefact_cases
import safetensors.torch
import torch
from most_memory import most_memory
from torch import Tensor

import doxa
from doxa.errors import DoxaError
from doxa.store import Checkpoints, read_artefact

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

MEMORY = 2 << 30  # bytes above what the process has when it begins
SECONDS = 5  # for one case
LARGE = 1e6  # a number from which on an overflow is what the network computes


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(12, 2, generator=g) * 2 - 1
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(12, 1, generator=g)


def posteriors(folder: Path) -> dict[str, Path]:
    """Saved ones of every kind: those that are stored with the tests, and new ones."""
    found = {path.name: path / "posterior" for path in artefact_cases.FOLDER.iterdir()}
    found["draws"] = artefact_cases.FOLDER / "draws" / "draws"
    quick: dict[str, Any] = {"steps": 2, "members": 2, "progress": False, "engine": "loop:eager"}
    methods: dict[str, Any] = {
        "laplace-kronecker": doxa.Laplace("kronecker", newton_steps=0),
        "laplace-functional": doxa.Laplace("functional", newton_steps=0),
        "low-rank-vi": doxa.LowRankVI(rank=2),
    }
    alone = ("sparse-gp", "deep-gp", "gp", "cnp")
    names = ("flow-vi", "rank1", "mnf", "batch-ensemble", "nngp", "ntk", "vip", "fbnn")
    for name in (*methods, *names, "sparse-gp", "deep-gp"):
        net = None if name in alone else doxa.nets.mlp(2, 1, hidden=(3,), activation="tanh")
        doxa.fit(net, data(), methods.get(name, name), **quick).save(folder / name)
        found[name] = folder / name
    net = doxa.nets.mlp(2, 1, hidden=(3,))
    doxa.fit(net, data(), "map", checkpoint=folder / "c", checkpoint_every=0, **quick)
    found["checkpoint"] = next((folder / "c").glob("*-step-*"))
    return found


def seed_of(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    raw = (path / "tensors.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    return json.loads((path / "meta.json").read_bytes()), header, raw[8 + length :]


NUMBERS = [
    0, 1, -1, 2, 3, 7, -7, 0.5, -0.5, 1e-300, 1e300, -1e300, 1 << 31, -(1 << 31), 1 << 62, 1 << 63,
    -(1 << 63) - 1, 10**9, 10**30, 10**400, math.nan, math.inf, -math.inf, True, False,
]  # fmt: skip
WORDS = [
    "", "x", "nan", "0", "float64", "int64", "complex64", "bool", "cuda", "meta", "cuda:99",
    "../../etc/passwd", "a" * 5000, "\x00", "ü", "sample", "gaussian", "laplace", "process",
    "mixture", "transformed", "linear", "implicit", "draws", "dense", "diagonal", "low-rank", "map",
    "gp", "kronecker", "mlp", "resnet20", "lenet5", "likelihood.categorical", "likelihood.gaussian",
    "prior.normal", "samples", "mean", "training", "uniform", "normal", "last_layer", "all",
]  # fmt: skip


def nested(depth: int, of: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = of(value)
    return value


def odd(rng: random.Random) -> Any:
    """A value of any type."""
    return rng.choice([
        None, [], {}, rng.choice(NUMBERS), rng.choice(WORDS), [rng.choice(NUMBERS)] * 3,
        [[1, 2], [3]], {"type": rng.choice(WORDS)}, {"type": "tuple", "items": []},
        {"type": "float", "value": rng.choice(["nan", "inf", "x", "1e400"])},
        {"type": "tuple", "items": [rng.choice(NUMBERS)]}, {"type": "dict", "items": [[[], 1]]},
        {"type": "dtype", "name": rng.choice(WORDS)}, {"type": "device", "name": rng.choice(WORDS)},
        {"type": "tensor", "dtype": "float32", "shape": [1 << 40], "data": [1.0]},
        {"type": "tensor", "dtype": "float32", "shape": [2], "data": ["nan", 1.0]},
        {"type": "array", "dtype": "<f8", "shape": [-1, 0], "data": []},
        {"type": "mlp", "inputs": 2}, {"type": "map"}, {"type": "prior.normal", "std": -1},
        {"type": 3}, {"tensor": "no such"}, nested(200, lambda v: [v]),
        nested(2000, lambda v: {"a": v}),
    ])  # fmt: skip


def changed(value: Any, rng: random.Random) -> Any:
    """Another value, mostly of the same type."""
    if rng.random() < 0.25:
        return odd(rng)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([*NUMBERS, value + 1, value - 1, -value, value * 1000, 3 * value])
    if isinstance(value, str):
        return rng.choice([*WORDS, value[:-1], value + "x", value.upper()])
    if isinstance(value, list):
        return rng.choice([[], value[:-1], [*value, *value], [*value, odd(rng)], value[::-1]])
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rng.choice([rest, rest | {key + "x": value[key]}, value | {"new": odd(rng)}])
    return odd(rng)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutate_json(document: Any, rng: random.Random, skip: Callable[[Any], bool]) -> Any:
    document = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        try:
            path = rng.choice([p for p in places(document) if not skip(p)] or [()])
        except RecursionError:  # nested deeply by the mutation before
            break
        if not path:
            return changed(document, rng)
        at = document
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = changed(at[path[-1]], rng)
    return document


SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1, "C64": 8}


def mutate_header(header: Any, data: bytes, rng: random.Random) -> tuple[Any, bytes]:
    """A file that a reader of the format accepts, or nearly: shapes, types, names, places."""
    names = sorted(header)
    if not names or rng.random() < 0.3:
        return mutate_json(header, rng, lambda path: False), data
    name = rng.choice(names)
    kind = rng.choice(["shape", "axis", "drop", "swap", "type", "rename", "add", "overlap", "nan"])
    header = copy.deepcopy(header)
    values = {n: data[slice(*header[n]["data_offsets"])] for n in header}
    entry = header[name]
    if kind == "overlap":
        entry["data_offsets"] = [o + rng.choice([-8, -4, 4, 8]) for o in entry["data_offsets"]]
        return header, data
    if kind == "shape":
        shape = entry["shape"]
        entry["shape"] = rng.choice([shape[::-1], [*shape, 1], [1, *shape], [math.prod(shape)]])
    elif kind == "axis" and entry["shape"]:
        axis = rng.randrange(len(entry["shape"]))
        row = SIZES.get(entry["dtype"], 1) * math.prod(
            entry["shape"][:axis] + entry["shape"][axis + 1 :]
        )
        size = rng.choice([0, 1, entry["shape"][axis] + 1, 2 * entry["shape"][axis]])
        entry["shape"][axis] = size
        values[name] = (values[name] * (size + 1) + bytes(row * size))[: row * size]
    elif kind == "drop":
        del header[name]
    elif kind == "swap":
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
        values[name], values[other] = values[other], values[name]
    elif kind == "type":
        entry["dtype"] = rng.choice(sorted(SIZES))
        length = SIZES[entry["dtype"]] * math.prod(entry["shape"])
        values[name] = (values[name] * 8 + bytes(length))[:length]
    elif kind == "rename":
        header[rng.choice([name + "x", name[:-1], rng.choice(names), "net.x", "buffer.x"])] = (
            header.pop(name)
        )
        values = {n: values.get(n, values[name]) for n in header}
    elif kind == "add":
        new = rng.choice(
            ["x", "net.9", "stat.x", "buffer.x", "layers", "at", "constant.x", "value.x"]
        )
        header[new], values[new] = copy.deepcopy(entry), values[name]
    elif kind == "nan" and entry["dtype"] in ("F32", "F64") and values[name]:
        form, size = ("<f", 4) if entry["dtype"] == "F32" else ("<d", 8)
        at = size * rng.randrange(len(values[name]) // size)
        number = struct.pack(
            form, rng.choice([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -1.0])
        )
        values[name] = values[name][:at] + number + values[name][at + size :]
    out = b""
    for n, own in header.items():
        own["data_offsets"] = [len(out), len(out) + len(values[n])]
        out += values[n]
    return header, out


def flipped(raw: bytes, rng: random.Random) -> bytes:
    if not raw:
        return b"x"
    kind = rng.choice(["flip", "flip", "flip", "cut", "grow", "zero"])
    at = rng.randrange(len(raw))
    if kind == "cut":
        return raw[:at]
    if kind == "grow":
        return raw + bytes(rng.randrange(1, 64))
    piece = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(raw))
        piece[at] = 0 if kind == "zero" else piece[at] ^ (1 << rng.randrange(8))
    return bytes(piece)


def for_people(path: tuple[Any, ...]) -> bool:
    """Entries that no prediction depends on, of which there are many: seldom changed."""
    return "history" in path or "diagnostics" in path


def write(folder: Path, seed: Any, rng: random.Random) -> str:
    """A mutated artefact; what was done to it."""
    meta, header, data = seed
    kind = rng.choices(
        ["json", "header", "flip", "flip-meta", "special"], [0.5, 0.28, 0.12, 0.08, 0.02]
    )[0]
    if kind == "json":
        skip = for_people if rng.random() < 0.9 else lambda path: False
        meta = mutate_json(meta, rng, skip)
    if kind == "header":
        header, data = mutate_header(header, data, rng)
    text = dumped(header)
    text += b" " * (-(8 + len(text)) % 64)
    files = {
        "tensors.safetensors": struct.pack("<Q", len(text)) + text + data,
        "meta.json": dumped(meta),
    }
    if kind == "flip":
        files["tensors.safetensors"] = flipped(files["tensors.safetensors"], rng)
    if kind == "flip-meta":
        files["meta.json"] = flipped(files["meta.json"], rng)
    sums = "".join(f"{hashlib.sha256(raw).hexdigest()}  {name}\n" for name, raw in files.items())
    files["checksums.sha256"] = sums.encode()
    if not folder.exists() or any(not e.is_file(follow_symlinks=False) for e in os.scandir(folder)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    if kind == "special":
        place = folder / rng.choice(sorted(files))
        raw = place.read_bytes()
        place.unlink()
        kind = rng.choice(["fifo", "link", "device", "folder", "sparse"])
        if kind == "fifo":
            os.mkfifo(place)
        elif kind == "link":
            (folder.parent / "outside").write_bytes(raw)
            place.symlink_to(folder.parent / "outside")
        elif kind == "device":
            place.symlink_to("/dev/zero")
        elif kind == "folder":
            place.mkdir()
        else:
            place.write_bytes(raw)
            os.truncate(place, 1 << 36)
    return kind


def dumped(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 100_000


class Slow(BaseException):
    """A case that takes too long."""


def alarm(*_: Any) -> None:
    raise Slow


def finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def answered(name: str, folder: Path) -> list[Tensor]:
    """The numbers that an artefact answers with."""
    if name == "draws":
        draws = doxa.Draws.load(folder)
        return [draws.theta, *draws.values()]
    if name == "checkpoint":
        found = Checkpoints(folder.parent).latest()
        assert found is not None and isinstance(found.step, int)
        return []  # a state may hold anything: the driver looks at it after every few steps
    posterior = doxa.load(folder)
    x = torch.linspace(-1, 1, 4).reshape(2, 2).to(posterior.dtype)
    p = posterior.predict(x, n=2)
    repr(posterior)
    return [p.mean, p.variance]


def large(folder: Path) -> bool:
    """Whether it holds numbers so large that a network overflows."""
    tensors, _ = read_artefact(folder)
    return any(
        bool((v.abs() > LARGE).any()) for v in tensors.values() if v.is_floating_point()
    ) or any(abs(v) > LARGE for v in numbers(json.loads((folder / "meta.json").read_bytes())))


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield value


def outcome(name: str, folder: Path) -> tuple[str, str]:
    """ "refused", "answered", or what went wrong, and where."""
    try:
        values = answered(name, folder)
    except DoxaError as error:
        return "refused", type(error).__name__
    except Slow:
        return "slow", traceback.format_exc().splitlines()[-4]
    except MemoryError as error:
        return "memory", place_of(error)
    except Exception as error:
        if "allocate" in str(error):
            return "memory", place_of(error)
        return "untyped", place_of(error)
    if all(map(finite, values)):
        return "answered", ""
    return ("overflow", "") if large(folder) else ("not finite", name)


def place_of(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "doxa" in f.filename]
    at = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1][:3])
    return f"{type(error).__name__} {at}: {str(error)[:120]}"


def readers_agree(folder: Path) -> bool:
    """In memory and mapped, what is read is what the library that defines the format reads; ours
    may refuse more."""
    try:
        want = safetensors.torch.load((folder / "tensors.safetensors").read_bytes())
    except safetensors.SafetensorError:
        want = None
    for budget in (None, 0):
        try:
            found = read_artefact(folder, budget)[0]
        except DoxaError:
            continue
        except Exception:
            return False
        if want is None or want.keys() != found.keys():
            return False
        if not all(
            v.dtype == found[n].dtype and v.shape == found[n].shape and raw(v).equal(raw(found[n]))
            for n, v in want.items()
        ):
            return False
    return True


def raw(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def main(cases: int, number: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    seeds = {name: seed_of(path) for name, path in sorted(posteriors(folder).items())}
    before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (before + MEMORY, before + MEMORY))
    signal.signal(signal.SIGALRM, alarm)
    rng = random.Random(number)
    began = time.monotonic()
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    example: dict[str, list[Any]] = {}
    for case in range(cases):
        name = rng.choice(sorted(seeds))
        place = folder / "case" / "00000001-step-2"
        place.parent.mkdir(exist_ok=True)
        own = random.Random(f"{number}/{case}")
        kind = write(place, seeds[name], own)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            result, where = outcome(name, place)
            if kind in ("header", "flip") and not readers_agree(place):
                result, where = "readers differ", name
        except Slow:
            result, where = "slow", kind
        signal.setitimer(signal.ITIMER_REAL, 0)
        counts[result] += 1
        if result not in ("refused", "answered", "overflow"):
            failures[f"{result}: {where}"] += 1
            example.setdefault(f"{result}: {where}", [name, case, kind])
    peak = most_memory()
    return {
        "counts": dict(counts), "seconds": time.monotonic() - began, "peak": peak,
        "processor": time.process_time(),
        "failures": [[n, text, *example[text]] for text, n in failures.most_common()],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))  # noqa: T201
