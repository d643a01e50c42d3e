"""The files and functions of doxa that a plain fit enters.

    python -m benchmarks.walk [--list]

The fit is `doxa.fit(net, (x, y), "sgld")` on a small network, four chains, everything else at its
default but the chain's length: 20 steps of burn-in and 20 draws, so that recording or compiling a
step is not worth while and none of that is walked.

What counts: a function or method with a name of its own, written with `def` in the package, that
is entered at least once, functions inside functions too; and the files that these lie in. What does
not: lambdas, comprehensions, class bodies, what `dataclass` generates, and importing, which is done
before. Building the method's settings counts, as it does when the method is given by name.
`--list` gives the files in the order in which they are first entered, with their functions.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import doxa

PACKAGE = Path(doxa.__file__).resolve().parent


def entered(call: Callable[[], Any]) -> list[CodeType]:
    """The package's functions that `call` enters, in order of first entry."""
    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return [code for code in seen if _counts(code)]


def _counts(code: CodeType) -> bool:
    """Bodies of modules and classes have no fast locals; lambdas and comprehensions no name."""
    named = bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")
    return named and Path(code.co_filename).is_relative_to(PACKAGE)


def by_file(codes: list[CodeType]) -> dict[str, list[str]]:
    """{file: its functions}, both in order of first entry."""
    files: dict[str, list[str]] = {}
    for code in codes:
        name = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        files.setdefault(name, []).append(code.co_qualname)
    return files


def plain_fit() -> Callable[[], Any]:
    """The fit that is walked, with everything imported that it needs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=g)
    y = x.sum(1, keepdim=True)
    net = doxa.nets.mlp(3, 1)
    method = doxa.get_method("sgld")
    lengths = {"draws": 20, "burn_in": 20, "thin": 1}
    return lambda: doxa.fit(net, (x, y), method(**lengths), progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="file by file, with the functions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = by_file(entered(plain_fit()))
    print(f"{len(files)} files, {sum(map(len, files.values()))} functions")
    if arguments.list:
        for name, functions in files.items():
            print(f"\n{name} ({len(functions)})")
            print("".join(f"    {function}\n" for function in functions), end="")


if __name__ == "__main__":
    main()
