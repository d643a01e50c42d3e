"""How many files and functions of doxa a plain call enters: a fit, a prediction, `doxa fit`.

    python -m benchmarks.walk [--list [NAME]]

The fits are of a small network on 200 rows with every default, rows held out where the method does
so, and few steps, so that a step is not recorded or compiled. The prediction asks a deep ensemble
for mean, standard deviation and interval. `doxa fit` reads a CSV file and saves the run.

What counts: a function or method with a name of its own, written with `def` in the package, that
is entered at least once, functions inside functions too; and the files that these lie in. What does
not: lambdas, comprehensions, class bodies, what `dataclass` generates, and importing, which is done
before. `LIMITS` are the most files that each may enter; exit status 1 where one enters more.
`--list` gives the files of one call (by default of sgld) in the order in which they are first
entered, with their functions.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

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


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=g)
    return x, x.sum(1) + 0.1 * torch.randn(200, generator=g)


def fit(method: Any, **options: Any) -> Callable[[], Any]:
    net, data = doxa.nets.mlp(3, 1), rows()
    return lambda: doxa.fit(net, data, method, progress=False, **options)


def predict() -> Callable[[], Any]:
    posterior, x = fit(doxa.DeepEnsemble(), steps=40)(), rows()[0][:5]

    def ask() -> None:
        p = posterior.predict(x)
        _ = p.mean, p.std, p.interval(0.9)

    return ask


def shell() -> Callable[[], Any]:
    """`doxa fit data.csv`, into a new folder each time."""
    from doxa.app import cli

    folder = Path(tempfile.mkdtemp())
    x, y = rows()
    lines = [
        "a,b,c,y",
        *(",".join(map(repr, row)) for row in torch.cat([x, y[:, None]], 1).tolist()),
    ]
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    numbers = iter(range(10))

    def run() -> None:
        out = str(folder / f"run{next(numbers)}")
        command = ["fit", str(folder / "data.csv"), "--target", "y", "--out", out, "--steps", "40"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cli.app(command, standalone_mode=False)

    return run


LIMITS = {
    "sgld": 37, "deep-ensemble": 45, "laplace": 51, "nuts": 38, "predict": 14, "doxa fit": 67,
}  # fmt: skip


def calls() -> dict[str, Callable[[], Any]]:
    """What is walked, with everything that it needs at hand."""
    return {
        "sgld": fit(doxa.SGLD(draws=20, burn_in=20, thin=1)),
        "deep-ensemble": fit(doxa.DeepEnsemble(), steps=40),
        "laplace": fit(doxa.Laplace(), steps=40),
        "nuts": fit(doxa.NUTS(draws=4, burn_in=10, max_depth=3)),
        "predict": predict(),
        "doxa fit": shell(),
    }


def walk(call: Callable[[], Any]) -> dict[str, list[str]]:
    """{file: its functions} of one call, after a first one that imports what is imported late."""
    call()
    return by_file(entered(call))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    listed = parser.add_argument("--list", nargs="?", const="sgld", choices=list(LIMITS))
    listed.help = "of one call, file by file, with the functions"
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    over = 0
    for name, call in calls().items():
        files = walk(call)
        over += len(files) > LIMITS[name]
        functions = sum(map(len, files.values()))
        print(f"{name:14} {len(files):3} files (at most {LIMITS[name]}), {functions} functions")
        if arguments.list == name:
            for file, entries in files.items():
                print(f"\n{file} ({len(entries)})")
                print("".join(f"    {entry}\n" for entry in entries), end="")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
