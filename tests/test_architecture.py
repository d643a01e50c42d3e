"""Data flows one way: a module imports from its left, never from its right."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import doxa

SOURCE = Path(doxa.__file__).parent

# From left to right, as the data flows. Parts on one line may not import each other.
LAYERS = [
    ["errors", "noise", "processes"],
    ["checks", "data", "describe", "http", "likelihoods", "linalg", "nets", "optim", "store"],
    ["predictive", "priors", "tables"],
    ["model", "registry"],
    ["engine"],
    ["method", "posterior"],
    ["driver", "ensemble", "exact", "laplace", "mcmc", "neural", "vi"],
    ["density", "diagnose", "evaluate", "fit", "function", "text"],
    ["decide", "plan", "plot", "selection", "tabular"],
    ["app", "sklearn"],
]
PLACE: dict[str, float] = {name: i for i, layer in enumerate(LAYERS) for name in layer}
PLACE["doxa"] = len(LAYERS) - 1.5  # the front page, which shows everything; only the last read it
PLACE["studio"] = len(LAYERS) - 1.25  # reads the front page; the command line starts it
PLACE["__main__"] = len(LAYERS)  # runs the app
HEAVY = (
    "pandas", "sklearn", "gpytorch", "matplotlib", "scipy", "pyarrow", "plotly", "arviz_base",
    "zuko", "jinja2", "starlette", "uvicorn",
)  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, which most tests here read."""
    return tuple(ast.walk(parsed(path)))


def written(node: ast.expr) -> str:
    """`ast.unparse`; dotted names, which are most of what is asked for, without its cost."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{written(node.value)}.{node.attr}"
    return ast.unparse(node)


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of doxa that a file belongs to: its folder, or its own name."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "doxa" if first == "__init__" else first


_BY_STRING = re.compile(r"doxa\.\w+(\.\w*)*(:\w+)?")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """The parts of doxa a file imports, also inside functions or by a string that names a module,
    and where; not those that only name types, which nothing runs."""
    typing = {
        id(inner)
        for node in nodes(path)
        if isinstance(node, ast.If) and written(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes(path):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            names = [module]
            if module == "doxa":  # from doxa import store: a part, or a name of the front page
                names = [f"doxa.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if part_of(path) == "registry" or not _BY_STRING.fullmatch(node.value):
                continue  # the registry says where methods live, so that listing them imports none
            names = [node.value.partition(":")[0]]
            if not ((SOURCE / names[0].split(".")[1]).exists()):
                continue
        else:
            continue
        for name in names:
            if name.split(".")[0] == "doxa":
                part = [*name.split("."), "doxa"][1]
                there = (SOURCE / part).is_dir() or (SOURCE / f"{part}.py").exists()
                yield (part if there else "doxa"), node.lineno


def ids(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_every_part_has_a_place() -> None:
    parts = {part_of(path) for path in files()}
    assert parts - set(PLACE) == set(), "say where it stands in LAYERS"
    assert set(PLACE) - parts == set(), "LAYERS names what does not exist"


def test_imports_point_left() -> None:
    """But for the front page, which shows everything, and `.plot()`, by which a result shows itself
    when a person asks for it."""
    wrong = [
        f"{ids(path)}:{line} imports {part}, which does not stand to the left of {part_of(path)}"
        for path in files()
        if part_of(path) != "doxa"
        for part, line in imports(path)
        if part != part_of(path)
        and PLACE[part] >= PLACE[part_of(path)]
        and (part_of(path), part) != ("describe", "plot")
    ]
    assert wrong == []


def test_there_are_few_layers() -> None:
    assert len(LAYERS) <= 10


def test_the_check_sees_what_it_should() -> None:
    """An import inside a function, of a package, of a module in a package, of the front page, and
    by a string, whole or the beginning of an f-string."""
    seen = {part for part, _ in imports(SOURCE / "app" / "bench" / "__init__.py")}
    assert "app" in seen
    text = ast.parse('store.register_lazily("x", f"doxa.evaluate.{target}")')
    found = [n.value for n in ast.walk(text) if isinstance(n, ast.Constant)]
    assert any(_BY_STRING.fullmatch(str(value)) for value in found)
    seen = {part for path in files() if part_of(path) == "app" for part, _ in imports(path)}
    assert {"doxa", "errors", "app"} <= seen
    assert "posterior" in {part for part, _ in imports(SOURCE / "mcmc" / "kernel.py")}
    assert "store" in {part for part, _ in imports(SOURCE / "ensemble" / "map.py")}


def calls(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that are called: `print`, `torch.load`."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            yield written(node.func), node.lineno


FORBIDDEN = {
    "print", "torch.load", "torch.save", "eval", "exec", "torch.set_default_dtype",
    "torch.set_num_threads", "torch.manual_seed", "torch.seed", "np.random.seed", "random.seed",
    "torch.use_deterministic_algorithms", "torch.set_grad_enabled",
}  # fmt: skip
THREADS = SOURCE / "engine" / "engine.py"
PROGRAMS = ("app", "studio", "processes")  # and the processes that they start
PICKLED = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def modules(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_prints_unpickles_or_touches_global_state() -> None:
    """A program may say how many threads it takes, and so may the processes it starts; a call may
    for its own length, in one place."""
    sets = "torch.set_num_threads"
    found = [
        f"{ids(path)}:{line} calls {name}"
        for path in files()
        for name, line in calls(path)
        if name in FORBIDDEN
        and not (name == sets and (part_of(path) in PROGRAMS or path == THREADS))
    ]
    assert found == []
    assert [ids(path) for path in files() if PICKLED & set(modules(path))] == []


def test_only_store_writes_files() -> None:
    writers = (
        "open", "os.rename", "os.replace", "os.fsync", "shutil.rmtree",
        "safetensors.torch.save_file",
    )  # fmt: skip
    methods = (".write_text", ".write_bytes", ".mkdir", ".unlink", ".rmdir", ".touch")
    found = [
        f"{ids(path)}:{line} calls {name}"
        for path in files()
        if part_of(path) not in ("store", "app")
        for name, line in calls(path)
        if name in writers or name.endswith(methods)
    ]
    assert found == []


def test_every_file_says_what_it_is() -> None:
    texts = {ids(path): ast.get_docstring(parsed(path)) or "" for path in files()}
    assert [name for name, text in texts.items() if len(text.partition("\n")[0]) <= 15] == []


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    names = {path.stem for path in files()}
    assert names & {"utils", "util", "helpers", "misc", "common", "tools"} == set()


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light_and_listing_methods_imports_none() -> None:
    code = """
import json, sys
import doxa
table = doxa.methods()
repr(table)
sys.stdout.write(json.dumps([[row.target for row in table], sorted(sys.modules)]))
"""
    targets, modules = json.loads(python(code))
    assert [name for name in HEAVY if name in modules] == []
    own = {target.partition(":")[0] for target in targets}
    assert own & set(modules) == set()


@pytest.mark.slow
def test_import_takes_little_longer_than_torch(tmp_path: Path) -> None:
    """At most 1.3 times, in processor time and as installed: compiled to bytecode once. Both in one
    process, one after the other, and the best of seven: on a busy machine two processes in turns
    differ by more than that, a process's two halves by a few hundredths."""
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    code = """
import time
import torch
after = time.process_time()
import doxa
print(time.process_time() / after)
"""
    ratios = [float(python(code, **cached)) for _ in range(8)][1:]  # the first warms the cache
    assert min(ratios) <= 1.3


@cache
def declared_within(package: str) -> set[str]:
    """The private names that the files of one part of doxa define: methods, attributes, globals."""
    found = set()
    for path in files():
        if part_of(path) != package:
            continue
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if written(node.value) in ("self", "cls", "new"):
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def private_reads(path: Path) -> Iterator[tuple[str, int]]:
    """The private attributes of other objects that a file reads or sets, and where."""
    for node in nodes(path):
        private = isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
        if private and written(node.value) not in ("self", "cls", "super()"):
            yield node.attr, node.lineno


# Of torch, of named tuples, of zuko and of the operating system.
FOREIGN_PRIVATE = {
    "_autograd", "_top_saved_tensors_default_hooks",
    "_asdict", "_fields", "_replace", "_backward_hooks", "_buffers", "_conv_forward", "_exit",
    "_foreach_copy_", "_forward_hooks", "_forward_pre_hooks", "_functorch", "_fused_adam_",
    "_inductor", "_modules", "_name", "_parameters", "_reversed_padding_repeated_twice", "_schema",
    "_standard_gamma", "_validate_args", "_version",
}  # fmt: skip


def test_no_part_reads_private_attributes_of_another() -> None:
    """A private name belongs to the part of doxa that defines it."""
    faults = []
    for path in files():
        own = declared_within(part_of(path))
        for name, line in private_reads(path):
            if name not in own | FOREIGN_PRIVATE:
                faults.append(f"{path.relative_to(SOURCE)}:{line}: .{name}")
    assert faults == []


def test_our_own_objects_are_not_asked_whether_they_have_an_attribute() -> None:
    """`hasattr` and `getattr` with a default are for objects from outside doxa: what ours have is
    declared on their base classes."""
    from doxa.likelihoods import Heads, Likelihood
    from doxa.method import Method
    from doxa.model import Model
    from doxa.posterior import Posterior, PredictiveTransform, SamplePosterior

    kinds = (doxa.Predictive, Posterior, SamplePosterior, PredictiveTransform, Method, Likelihood,
             Heads, Model)  # fmt: skip
    ours = {name for kind in kinds for name in (*dir(kind), *kind.__annotations__)}
    ours |= {"level", "noise", "temperature", "transform"}
    # These are also attributes of data frames, arrays, layers and functions from outside; a saved
    # file may name anything as its method, so that it is asked for `prepare`.
    ours -= {"__dict__", "__name__", "builder", "columns", "dtype", "groups", "kind", "prepare"}
    faults = []
    for path in files():
        for node in nodes(path):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            asked = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            name = node.args[1] if asked else None
            if isinstance(name, ast.Constant) and name.value in ours:
                faults.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {name.value}")
    assert faults == []
