"""Mutation testing: the share of planted bugs that the tests find, drawn with a seed.

    python -m benchmarks.mutants [--count 100] [--seed 20261118] [--first 0] [--out FILE]
    python -m benchmarks.mutants --list              the sites, without running anything
    python -m benchmarks.mutants --only 4,9 --slow   some of them, by the slow tests too

A site is an operator, a comparison, a number or an argument in one of the packages below. Sites are
drawn uniformly within each of the four kinds, in turns, so that the first n of a longer draw are a
draw of n. Each mutant is planted in a copy of the source, and the quick tests of its package and
the contract tests of its methods are run until one fails. A mutant that no test sees is listed:
either a test is missing, or the mutant changes nothing that a test could see (a tolerance, a chunk
size, a message), which `EQUIVALENT` says with its reason; those are drawn again.

The seed of the published draw was written down before the first mutant was run. One thread each.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "doxa"
PACKAGES = ("vi", "laplace", "mcmc", "function", "neural", "decide", "evaluate", "driver")
SEED = 20261118
KINDS = ("arithmetic", "comparison", "constant", "argument")
QUICK, SLOW = "not slow and not data and not gpu", "slow and not data and not gpu"

ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.MatMult: None, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
COMPARISON = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}  # fmt: skip

# {(path, what it was, what it becomes): why no test could see it}; a number becomes a whole line
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "mcmc/convergence.py",
        "_BLOCK // (members * draws)",
        "_BLOCK * (members * draws)",
    ): "how many entries are compared at a time",
    (
        "mcmc/constant_sgd.py",
        "Stage('rate', self._probe, 0, self.rows, enter=self._given)",
        "Stage(self._probe, 'rate', 0, self.rows, enter=self._given)",
    ): "a stage of no steps: neither its name nor its step is used",
    (
        "function/inducing.py",
        "(v @ a).mT + psi.reshape(copies, rows, -1) @ weights",
        "(v @ a).mT - psi.reshape(copies, rows, -1) @ weights",
    ): "the weights of random features are symmetric about 0",
    (
        "driver/loop.py",
        "len(part) == len(self.values)",
        "len(part) != len(self.values)",
    ): "a copy or a view of the same draws",
    (
        "function/wide/gpytorch_kernel.py",
        "torch.equal(x1, x2)",
        "torch.equal(x2, x1)",
    ): "equality is symmetric",
    (
        "mcmc/constant_sgd.py",
        "1",
        "width = torch.finfo(theta.dtype).eps ** 0.28 * (2 + theta.norm(dim=1, keepdim=True))",
    ): "the width of a finite difference, by at most a factor of 2",
    (
        "function/implicit_process.py",
        "max(functions, self.basis[..., 0].numel())",
        "max(self.basis[..., 0].numel(), functions)",
    ): "a maximum is symmetric",
    (
        "function/deep_gp.py",
        "f + variance.sqrt() * eps.reshape(f.shape)",
        "f - variance.sqrt() * eps.reshape(f.shape)",
    ): "the noise is symmetric about 0",
    (
        "evaluate/recalibrate.py",
        "z - expected.unsqueeze(1)",
        "z + expected.unsqueeze(1)",
    ): "how long Newton steps are that a bracket keeps on their way to the same root",
    (
        "vi/last_layer.py",
        "len(rows) > _PROBED",
        "len(rows) <= _PROBED",
    ): "how many rows are checked at a time: all of many, or few of them several times",
    (
        "function/gp.py",
        "optimise(objective, run.steps, name='hyper-parameters', source='all', validates=False, "
        "capturable=False)",
        "optimise(objective, run.steps, source='all', validates=False, capturable=False)",
    ): "the label of a stage; full batches draw nothing under it",
    (
        "function/inducing.py",
        "4",
        "wide @ noise.normal((wide.shape[2], FEATURES), 0, 5 + i)",
    ): "other random numbers of the same distribution",
    (
        "function/variational.py",
        "1",
        "replicates = _REPLICATES if self.random_bound(run) else 2",
    ): "a bound that is not random is the same from two copies of a row",
    (
        "evaluate/reference_distance.py",
        "agreement(p, q)",
        "agreement(q, p)",
    ): "an agreement is symmetric",
    (
        "function/evidence.py",
        "1.0",
        "steep = there.norm(dim=1).clamp_min(2.0)",
    ): "the length of the first step of a quasi-Newton method",
    (
        "evaluate/scores.py",
        "math.ceil(finest) + 2",
        "math.ceil(finest) - 2",
    ): "four points of some eighty or more in a trapezoid rule that is exact to rounding",
    (
        "vi/ivon.py",
        "max(steps, 1)",
        "max(1, steps)",
    ): "a maximum is symmetric",
}


@dataclass(frozen=True)
class Site:
    """Where a mutant is, and what it is."""

    path: str
    line: int
    column: int
    kind: str
    was: str
    becomes: str
    code: str  # the line on which it begins, with what it becomes

    def key(self) -> tuple[str, str, str]:
        """What `EQUIVALENT` knows it by: a number alone would be every such number of the file."""
        becomes = self.code if self.kind == "constant" else self.becomes
        return self.path.removeprefix("src/doxa/"), self.was, becomes


def sites() -> dict[str, list[tuple[Site, str]]]:
    """Every site with the mutated source, by kind, in the order of the source."""
    found: dict[str, list[tuple[Site, str]]] = {kind: [] for kind in KINDS}
    for package in PACKAGES:
        for path in sorted((SOURCE / package).rglob("*.py")):
            for site, text in _of_file(path):
                found[site.kind].append((site, text))
    return found


def _of_file(path: Path) -> Iterator[tuple[Site, str]]:
    text = path.read_text(encoding="utf-8")
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    tree = ast.parse(text)
    hidden = {id(inner) for node in _unseen(tree) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in hidden or not isinstance(node, ast.expr):
            continue
        for kind, new in _mutated(node):
            was, becomes = ast.unparse(node), ast.unparse(new)
            where = node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0
            line = lines[node.lineno - 1]
            code = line[: node.col_offset] + becomes.encode() + line[node.end_col_offset :]
            file = str(path.relative_to(ROOT))
            site = Site(
                file, node.lineno, node.col_offset, kind, was, becomes, code.decode().strip()
            )
            yield site, _replaced(lines, where, f"({becomes})")


def _unseen(tree: ast.AST) -> Iterator[ast.AST]:
    """Annotations, docstrings, messages and f-strings: nothing there computes."""
    for node in ast.walk(tree):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, ast.JoinedStr | ast.Raise):
            yield node
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.Call) and _name(node.func) in ("warning", "info", "debug"):
            yield node


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _mutated(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.BinOp):
        other = ARITHMETIC.get(type(node.op))
        texts = any(
            isinstance(side, ast.Constant) and isinstance(side.value, str)
            for side in (node.left, node.right)
        )
        if other is not None and not texts:
            yield "arithmetic", ast.BinOp(node.left, other(), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        if not isinstance(node.operand, ast.Constant):
            yield "arithmetic", node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARISON.get(type(node.ops[0]))
        if other is not None:
            yield "comparison", ast.Compare(node.left, [other()], node.comparators)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        new = node.value + 1 if type(node.value) is int else 2.0 * node.value + (node.value == 0)
        yield "constant", ast.Constant(new)
    elif isinstance(node, ast.Call):
        starred = any(isinstance(arg, ast.Starred) for arg in node.args)
        if len(node.args) >= 2 and not starred:
            swapped = [node.args[1], node.args[0], *node.args[2:]]
            if ast.dump(swapped[0]) != ast.dump(swapped[1]):
                yield "argument", ast.Call(node.func, swapped, node.keywords)
        for k, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                rest = node.keywords[:k] + node.keywords[k + 1 :]
                yield "argument", ast.Call(node.func, node.args, rest)


def _replaced(lines: list[bytes], where: tuple[int, int, int, int], new: str) -> str:
    """The source with one expression replaced; columns are counted in bytes."""
    first, start, last, end = where
    before = b"".join(lines[: first - 1]) + lines[first - 1][:start]
    after = lines[last - 1][end:] + b"".join(lines[last:])
    return (before + new.encode() + after).decode()


def draw(count: int, seed: int) -> list[tuple[Site, str]]:
    """Mutants in turns over the kinds; those that are known to change nothing are drawn again."""
    rng = random.Random(seed)
    pools = sites()
    for pool in pools.values():
        rng.shuffle(pool)
    chosen: list[tuple[Site, str]] = []
    while len(chosen) < count:
        kind = KINDS[len(chosen) % len(KINDS)]
        site, text = pools[kind].pop()
        if site.key() not in EQUIVALENT:
            chosen.append((site, text))
    return chosen


def tests_of(path: str, slow: bool) -> list[tuple[str, list[str]]]:
    """What may kill a mutant of a file, the nearest first: which tests, and where."""
    package = Path(path).parts[2]
    stem = Path(path).stem
    folder = ROOT / "tests" / package
    near = [str(p) for p in sorted(folder.rglob(f"test_*{stem}*.py"))]
    commands = [[*near]] if near else []
    commands.append([str(folder)])
    names = sorted(set(re.findall(r'store\.register\("([\w-]+)"\)', (ROOT / path).read_text())))
    if package in ("vi", "laplace", "mcmc", "function", "neural"):
        chosen = names or _family(package)
        commands.append([str(ROOT / "tests" / "contract"), "-k", " or ".join(chosen)])
        commands.append([str(ROOT / "tests" / "statistical"), "-k", " or ".join(chosen)])
    elif package == "driver":
        commands.append([str(ROOT / "tests" / "contract"), "-k", "map or swag or laplace"])
        commands.append([str(ROOT / "tests" / "method"), str(ROOT / "tests" / "protocol")])
    else:
        commands.append([str(ROOT / "tests" / "app"), "-k", package])
    return [(QUICK, c) for c in commands] + [(SLOW, c) for c in commands if slow]


def _family(package: str) -> list[str]:
    text = "".join(p.read_text() for p in (SOURCE / package).rglob("*.py"))
    return sorted(set(re.findall(r'store\.register\("([\w-]+)"\)', text)))


def kill(
    site: Site, text: str, python: str, seconds: float, slow: bool = False
) -> tuple[bool, str]:
    """Whether a test fails under the mutant, and which."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        shutil.copytree(ROOT / "src", Path(place) / "src", ignore=shutil.ignore_patterns("__py*"))
        (Path(place) / site.path).write_text(text, encoding="utf-8")
        env = {
            **os.environ, "PYTHONPATH": str(Path(place) / "src"), "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        ended = time.monotonic() + seconds
        for chosen, command in tests_of(site.path, slow):
            full = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", chosen]
            full += ["-W", "ignore", "--no-header", *command]
            try:
                out = subprocess.run(
                    full, cwd=ROOT, env=env, capture_output=True, text=True,
                    timeout=max(1.0, ended - time.monotonic()),
                )  # fmt: skip
            except subprocess.TimeoutExpired:  # a busy machine, or a mutant that hangs: look
                return False, "time ran out"
            if out.returncode not in (0, 5):  # 5: no test was selected
                lines = [x for x in out.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
                return True, (lines or out.stdout.splitlines()[-1:] or ["failed"])[0][:160]
    return False, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--first", type=int, default=0, help="skip so many of the draw")
    parser.add_argument("--seconds", type=float, default=600, help="for one mutant, at most")
    parser.add_argument("--slow", action="store_true", help="the slow tests, where quick ones pass")
    parser.add_argument("--only", default="", help="the numbers of some of the draw")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--list", action="store_true", help="print the draw and run nothing")
    parser.add_argument("--out", type=Path, help="append a line of JSON per mutant")
    args = parser.parse_args()
    killed = 0
    drawn = draw(args.count, args.seed)[args.first :]
    only = {int(number) for number in args.only.split(",") if number}
    for number, (site, text) in enumerate(drawn, args.first):
        if only and number not in only:
            continue
        where = f"{number:3d} {site.path}:{site.line} {site.kind}: {site.was} → {site.becomes}"
        if args.list:
            print(where)
            continue
        began = time.monotonic()
        dead, by = kill(site, text, args.python, args.seconds, args.slow)
        killed += dead
        print(f"{'killed' if dead else 'LIVES '} {where} | {by}", flush=True)
        if args.out:
            record = {
                "number": number, **asdict(site), "killed": dead, "by": by,
                "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            with args.out.open("a") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    if not args.list:
        print(f"{killed} of {len(only) or len(drawn)} killed")


if __name__ == "__main__":
    main()
