"""From a table to a saved posterior: the parts that `doxa fit` and `doxa compare` share.

Hyper-parameters of a method on the command line (`make_method`). The dataclass fields of a method
are its settings: `--set rank=20 --set temperature=0.1` makes `SWAG(rank=20, temperature=0.1)`.
Values are read as Python literals (numbers, true/false, none, tuples), and as plain text otherwise.
The values that a field allows (`doxa.method.method`) are shown beside it and checked by the method.

The cost of a sampler, printed before it starts (`cost_words`). One gradient of all chains on all
rows takes about

    seconds = 6·10⁻⁴ + chains × 6 × parameters × rows / 10¹⁰

on one core. This was measured: launching dominates for small networks, arithmetic for larger ones.
Small networks are fitted on one thread, whatever the number of threads of torch.

The fit itself (`Plan`, `fit_arrays`), its record (`provenance`), the network (`make_net`), loading
a saved run (`load_run`), and the folders of a run and its checkpoints (`prepare_out`,
`forget_checkpoint`). Checks before a run is written (`check_new`, `check_place`) or recalibrated
(`check_unseen`), and the record of a calibration.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

import doxa
from doxa import nets
from doxa.app.calibration import Calibration
from doxa.app.held_out import checksum, checksum_of_files
from doxa.app.task_tables import grouped
from doxa.data.streams import Stream
from doxa.driver.setup import FEWEST_ROWS, cross_fit_parts, member_ids, parts
from doxa.errors import (
    CorruptedArtefact,
    DataError,
    MethodError,
    ModelError,
    StoreError,
    did_you_mean,
)
from doxa.method import Method
from doxa.method.method import Choice, Rule, rules
from doxa.registry import Row
from doxa.store import decode, decoding, is_artefact, read_artefact
from doxa.store.artefact import META, beside
from doxa.tables.files import Array, check_name
from doxa.tables.predictions import conformal_level
from doxa.tables.schema import Schema, Together
from doxa.tabular import arguments, fit_encoded


def gradient_seconds(gradients: int, chains: int, parameters: int, rows: int) -> float:
    """The approximate time of this number of gradients of all chains on one core."""
    return gradients * (6e-4 + 6.0 * chains * parameters * rows / 1e10)


def cost_words(method: Method, members: int | None, parameters: int, rows: int) -> str:
    """The expected cost of a method, as a message; "" if its number of steps is its cost."""
    if method.gradients is None:
        return ""
    least, most = method.gradients
    chains = members or method.default_members
    short, long = (span(gradient_seconds(n, chains, parameters, rows)) for n in method.gradients)
    who = f"{chains} chains" if chains > 1 else "one chain"
    if least == most:
        return (
            f"{method.name}: {most:,} gradients of {who} on all {rows:,} rows, about {long} on one "
            "core"
        )
    return (
        f"{method.name}: {least:,} to {most:,} gradients of {who} on all {rows:,} rows, "
        f"depending on the length of the trajectories: {short} to {long} on one core"
    )


def span(seconds: float) -> str:
    """A length of time in a readable unit."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "1 s"


_WORDS = {"true": True, "false": False, "none": None, "null": None}


def make_method(name: str, settings: Sequence[str] = (), warn: bool = True) -> Any:
    """The method with its `--set` values; the method raises an error for a value out of range.
    Old names of settings give a warning, unless `warn` is False."""
    cls = doxa.get_method(name)
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    declared = rules(cls)
    chosen: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise MethodError(f"--set takes NAME=VALUE, not {setting!r}")
        now = cls.renamed.get(key, key)
        if now not in fields:
            hint = did_you_mean(key, sorted(fields), renamed=cls.renamed)
            hint = hint if fields else "; it has no settings"
            raise MethodError(f"method {name!r} has no setting {key!r}{hint}")
        if key in chosen:
            raise MethodError(f"--set {key} is given twice, as {chosen[key]!r} and as {text}")
        chosen[key] = read_value(text, declared.get(now))
    try:
        return cls(**cls.current_settings(chosen, warn=warn))
    except (
        TypeError,
        AttributeError,
    ) as error:  # raised by a check of the method
        shown = ", ".join(settings)
        raise MethodError(f"method {name!r} cannot use {shown}: {error}") from error


def fields_of(cls: Any) -> list[tuple[str, str, str, str]]:
    """(setting, type, default, allowed values) of every hyper-parameter."""
    rows, declared = [], rules(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.default is not dataclasses.MISSING:
            default = repr(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = repr(field.default_factory())
        else:
            default = "required"
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
        allowed = declared[field.name].words(field.name) if field.name in declared else ""
        rows.append((field.name, str(kind), default, allowed))
    return rows


def show_methods(console: Console) -> None:
    """Print the table of methods; a narrow terminal shows fewer columns."""
    columns = {"name": "method", "family": "family", "summary": "what it is"}
    if console.width >= 120:
        columns |= {"gives": "gives", "cost": "cost (MAP = 1)", "paper": "paper"}
    if console.width >= 160:
        columns |= {"needs": "needs", "shares": "processes share"}
    table = Table(*columns.values())
    for row in doxa.methods():
        table.add_row(*(escape(getattr(row, name)) for name in columns))
    console.print(table)
    console.print("doxa methods NAME shows one method: its settings, requirements, cost and paper")


_STREAMS = {
    "batches": "by mini-batches", "passes": "by mini-batches and passes over all rows", "": "",
}  # fmt: skip


def facts_of(row: Row) -> dict[str, str]:
    """The facts of a method in the registry, besides its summary; empty ones are dropped."""
    numbers = [word for word, has in (("evidence", row.evidence), ("ELBO", row.elbo)) if has]
    facts = {
        "for": ", ".join(row.tasks),
        "gives": row.gives,
        "model selection by": ", ".join(numbers),
        "needs": row.needs,
        "extra": f"pip install 'doxa[{row.extra}]'" if row.extra else "",
        "cost": row.cost,
        "streams": _STREAMS[row.streams],
        "processes share": row.shares,
        "paper": row.paper,
        "described in": f"docs/{row.docs}" if row.docs else "",
    }
    return {what: text for what, text in facts.items() if text}


def show_method(name: str, console: Console) -> None:
    """Print one method: its summary, paper and settings."""
    row, cls = doxa.methods()[name], doxa.get_method(name)
    console.print(f"[bold]{escape(row.name)}[/] ({escape(row.family)}): {escape(row.summary)}")
    for what, text in facts_of(row).items():
        console.print(f"{what}: {escape(text)}", highlight=False)
    console.print(escape(inspect.cleandoc(cls.__doc__ or "")), highlight=False)
    table = Table("--set", "type", "default", "allowed")
    for field in fields_of(cls):
        table.add_row(*map(escape, field))
    console.print(table if table.row_count else "no settings")


def read_value(text: str, rule: Rule | None = None) -> Any:
    """The value of a setting; a name among the choices of a rule stays text, "none" included."""
    text = text.strip()
    if isinstance(rule, Choice) and text in rule.choices:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


ASKED = "asked.json"  # beside checkpoints: the options of their fit


@dataclass(frozen=True)
class Plan:
    """The options of a fit, besides data and method. None: the default of the method."""

    net: str | None = None  # module:builder
    hidden: tuple[int, ...] = (50,)
    members: int | None = None
    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    batch_size: int | None = None
    validation: float | None = None
    device: str | None = None
    seed: int = 0

    def options(self) -> dict[str, Any]:
        asked = {
            "members": self.members,
            "epochs": self.epochs,
            "steps": self.steps,
            "lr": self.lr,
            "batch_size": self.batch_size,
            "device": self.device,
        }
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def held_out(self) -> float | str | None:
        """The argument `validation` of `doxa.fit`: 0 trains on all rows, None is the default."""
        return "auto" if self.validation is None else self.validation or None


def fit_arrays(
    schema: Schema,
    x: Array,
    y: Array,
    method: str,
    settings: Sequence[str],
    plan: Plan,
    checkpoint: Path | None = None,
    checkpoint_every: float = 30.0,
    tasks: Sequence[str] | None = None,
    together: Together | None = None,
) -> Any:
    """The posterior, with the schema in its metadata; tasks: the task of each row; together: their
    groups and times."""
    data = (x, y) if tasks is None else grouped(x, y, tasks)
    return _fit(
        schema, data, method, settings, plan, together,
        checkpoint=None if checkpoint is None else str(checkpoint),
        checkpoint_every=checkpoint_every,
    )  # fmt: skip


def fit_stream(
    schema: Schema, rows: Stream, method: str, settings: Sequence[str], plan: Plan,
    checkpoint: Path, checkpoint_every: float = 30.0,
) -> Any:  # fmt: skip
    """As `fit_arrays`, for a table that is read by windows."""
    return _fit(
        schema, rows, method, settings, plan, None, checkpoint=str(checkpoint),
        checkpoint_every=checkpoint_every,
    )  # fmt: skip


def _fit(
    schema: Schema, data: Any, method: str, settings: Sequence[str],
    plan: Plan, together: Together | None, **options: Any,
) -> Any:  # fmt: skip
    chosen = make_method(method, settings, warn=False)  # the command warned
    net = make_net(plan, schema.inputs, schema.outputs) if chosen.needs_network else None
    posterior = fit_encoded(
        schema, net, data, chosen, **_options(plan, together), **options, progress=True
    )
    if net is not None and nets.builder_of(net) is None:
        posterior.metadata["net"] = plan.net
    return posterior


def plan_arrays(
    schema: Schema, x: Array, y: Array, method: str, settings: Sequence[str], plan: Plan,
    tasks: Sequence[str] | None = None, together: Together | None = None,
) -> doxa.FitPlan:  # fmt: skip
    """The memory and time of the fit that `fit_arrays` makes with these arguments."""
    chosen = make_method(method, settings, warn=False)
    net = make_net(plan, schema.inputs, schema.outputs) if chosen.needs_network else None
    data = (x, y) if tasks is None else grouped(x, y, tasks)
    return doxa.plan(net, **arguments(schema, data, chosen), **_options(plan, together))


def _options(plan: Plan, together: Together | None) -> dict[str, Any]:
    """The options of a fit and of its rows, as arguments of `doxa.fit`."""
    own = {} if together is None else together.options()
    return {"seed": plan.seed, "validation": plan.held_out} | plan.options() | own


def network_size(plan: Plan, method: Method, schema: Schema) -> int:
    """The number of weights of the network that is fitted; 0 without a network."""
    if not method.needs_network:
        return 0
    net = make_net(plan, schema.inputs, schema.outputs)
    return sum(p.numel() for p in net.parameters())


def say_held_out(
    plan: Plan, method: Method, rows: int, size: int = 0, together: Together | None = None
) -> str:
    """The message about held-out rows; "" if there are none. `size`: the network's weights."""
    off = "--validation 0 trains on all rows"
    if together is not None and together.options() and plan.held_out is not None:
        if not (method.holds_out or plan.validation):
            return (
                f"{method.name} holds out no rows by default: --validation 0.2 evaluates it on new "
                "groups or later rows"
            )
        if together.time is not None:
            return (
                "the last rows evaluate the fit, and the rows before them stop the training and "
                f"set the noise; the fit is then trained on all rows; {off}"
            )
        return f"rows are held out in whole groups, so that new groups evaluate the fit; {off}"
    if plan.validation:
        return f"{plan.validation:.0%} of the rows are held out for early stopping; {off}"
    if plan.validation is None and method.holds_out and rows >= FEWEST_ROWS:
        count = cross_fit_parts([rows], weights=size)
        if count and len(member_ids(plan.members, method)) == 1:
            return (
                f"the rows are divided into {count} parts, and {count} networks are trained first, "
                "each without one part, for early stopping, the noise and to evaluate the fit; the "
                f"fit is then trained on all rows; {off}"
            )
        what = f"each member holds out a different {1 / parts(rows):.0%} of the rows"
        return f"{what}, for early stopping and to evaluate the fit; {off}"
    return ""


def say_cost(plan: Plan, method: Method, rows: int, size: int) -> str:
    """The cost of a sampler and the meaning of `--steps`, before the fit; "" if neither applies."""
    lines = []
    if method.gradients is not None and method.needs_network:
        lines.append(cost_words(method, plan.members, size, rows))
    length = "steps" if plan.steps is not None else "epochs"
    if (number := getattr(plan, length)) is not None:
        lines.append(
            f"--{length} {number}: {number:,} {length} of optimisation, for methods that optimise; "
            "other stages (burn-in, draws, the noise on held-out rows) have their own lengths and "
            "are added"
        )
    return "\n".join(lines)


def stages_message(posterior: Any) -> str:
    """The steps of each stage of a fit that had more than one; "" otherwise."""
    history = posterior.history
    names = history.get("stage", [])
    ends = [step for step in history.get("step", []) if isinstance(step, int)]
    last = dict(zip(names, ends, strict=False))  # of a name, the step at which its stage ended
    if len(last) < 2:
        return ""
    starts = (0, *last.values())
    each = [
        f"{name} {end - start:,}" for (name, end), start in zip(last.items(), starts, strict=False)
    ]
    return f"steps per stage: {', '.join(each)}"


def held_out_message(posterior: Any) -> str:
    """The held-out scores ± their standard errors, and how they were made; "" without held-out
    rows."""
    found = posterior.diagnostics.get("held_out")
    if not found:
        return ""
    titles = {"log_prob": "log likelihood", "gain": "gain over a constant",
              "coverage": "share in 90 % intervals"}  # fmt: skip
    each = [
        f"{title} {found[name]:.3g} ± {found[f'{name}_error']:.2g}"
        for name, title in titles.items() if name in found
    ]  # fmt: skip
    count = found["corrected_for"]
    rows = f"{found['rows']:,} held-out rows, by {found['by']}"
    numbers = f", corrected for {count} chosen number{'s' * (count != 1)}" if count else ""
    return f"new rows: {', '.join(each)} (estimated from {rows}{numbers})"


def provenance(data: Path, rows: int, plan: Plan, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a fit for its report, kept in the posterior's metadata."""
    digest = checksum_of_files(data) if data.is_dir() else checksum(data)
    return {
        "source": {"file": data.name, "sha256": digest, "rows": rows},
        "asked": {**asdict(plan), **asked},
        "versions": {
            "doxa": doxa.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def make_net(plan: Plan, inputs: int, outputs: int) -> nn.Module:
    """The default MLP, or the network that the user's `module:builder` returns."""
    if plan.net is None:
        return nets.mlp(inputs, outputs, plan.hidden)
    module_name, colon, function = plan.net.partition(":")
    if not colon or not function or module_name.endswith(".py"):
        raise ModelError(f"--net takes module:builder, such as mynets:wide, not {plan.net!r}")
    folder = os.getcwd()
    if folder not in sys.path:  # the module is usually in the working directory
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        raise ModelError(f"--net {plan.net}: cannot import {module_name!r}: {error}") from error
    builder = getattr(module, function, None)
    if builder is None:
        hint = did_you_mean(function, [name for name in vars(module) if not name.startswith("_")])
        raise ModelError(f"--net {plan.net}: {module_name!r} has no {function!r}{hint}")
    try:
        net = builder(inputs, outputs)
    except Exception as error:  # whatever the user's builder raises
        called = f"{function}({inputs}, {outputs}), which is (inputs, outputs)"
        raise ModelError(f"--net {plan.net}: called as {called}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ModelError(f"--net {plan.net} gave {type(net).__name__}, not a torch.nn.Module")
    return net


def load_run(run: Path, net: str | None = None, missing: str | None = None) -> tuple[Any, Schema]:
    """A posterior that `doxa fit` saved, and its schema; `missing`: how missing cells of new rows
    are treated, if not as in the fit."""
    # The network's shape is in the schema, which must be read before the network can be made.
    saved = _read(run)
    with decoding(run):
        record = decode(saved.get("record", {}), "record")
        metadata = record.get("metadata") if isinstance(record, dict) else None
        if not isinstance(metadata, dict) or not isinstance(metadata.get("net"), str | None):
            raise StoreError(
                f"{run} does not hold the metadata that doxa fit saves with a posterior"
            )
        if "table" not in metadata:
            raise StoreError(f"{run} holds a posterior that was not fitted from a table")
        schema = Schema.from_json(metadata["table"])
    if net is not None and saved.get("model") is None:
        raise ModelError(f"{run} was fitted without a network: remove --net")
    own = metadata.get("net")
    if own is not None and net is None:
        raise ModelError(f"{run} was fitted with a network of your own: pass --net {own}")
    made = None if net is None else make_net(Plan(net=net), schema.inputs, schema.outputs)
    return doxa.load(str(run), net=made), schema.with_missing(missing)


def _read(run: Path) -> dict[str, Any]:
    """The facts of a run; a clear error for a folder that holds no run."""
    try:
        return read_artefact(run)[1]
    except CorruptedArtefact:
        raise
    except StoreError as error:
        if (run / META).exists():
            raise
        what = "is no run" if run.exists() else "does not exist"
        raise StoreError(f"{run} {what}; give the folder that doxa fit saved (--out)") from error


def prepare_out(out: Path, overwrite: bool = False) -> Path:
    """Check, before anything is read, that `out` may be written; return the checkpoint's folder.

    A finished run is replaced only with `overwrite`, and only when the new one is finished. The
    checkpoint lies beside `out` and not in it, because saving replaces the whole folder at once.
    """
    check_name(out)
    if out.exists() and not out.is_dir():
        raise StoreError(f"{out} is a file; --out is a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / "meta.json").exists():
        raise StoreError(f"{out} holds other files; choose an empty or a new folder for --out")
    if is_artefact(out) and not overwrite:
        raise StoreError(
            f"{out} already holds a finished run; --overwrite replaces it, or choose another --out"
        )
    if (out / "watch").exists():
        raise StoreError(
            f"{out} holds the state of doxa watch, which replacing the run would delete; remove or "
            f"move {out / 'watch'}, or choose another --out"
        )
    place = Path(os.path.abspath(out))
    if Path.cwd().is_relative_to(place):
        raise StoreError(
            f"{out} is the current folder, or contains it; choose another folder for --out"
        )
    return checkpoint_of(out)


def checkpoint_of(out: Path) -> Path:
    """The folder of the checkpoints of a run."""
    place = Path(os.path.abspath(out))
    named = place.with_name(place.name + ".checkpoint")
    return named if len(os.fsencode(named.name)) < 224 else beside(place, ".checkpoint")


def forget_checkpoint(checkpoint: Path) -> None:
    """Remove the checkpoints of a fit that is saved or abandoned. Its options are removed first, so
    that a removal that was interrupted is never resumed."""
    (checkpoint / ASKED).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def check_new(target: Path) -> None:
    """An error if the folder exists: a run never replaces anything."""
    check_name(target)
    if target.exists():
        raise StoreError(f"{target} exists already; choose another folder with --out")
    check_place(target)


def check_place(target: Path) -> None:
    """Check, before the work, that the folder exists or can be created."""
    check_name(target)
    if target.is_dir():
        return
    if target.exists():
        raise StoreError(f"{target} is a file; --out is a folder")
    above = next(place for place in target.absolute().parents if place.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".doxa-", dir=above))
    except OSError as error:
        why = "it is a file" if above.is_file() else error.strerror
        raise StoreError(
            f"{target} cannot be made in {above}: {why}; choose another folder with --out"
        ) from error


def check_unseen(posterior: Any, run: Path, data: Path) -> str:
    """The checksum of the rows to calibrate on. An error if the fit or an earlier calibration has
    seen them, or if the run is conformal already."""
    level = conformal_level(posterior)
    if level is not None:
        raise MethodError(
            f"{run} is conformal already, at level {level:g}; another calibration would void its "
            "guarantee; calibrate the run that it was made from"
        )
    digest = checksum(data)
    if digest == posterior.metadata.get("source", {}).get("sha256"):
        raise DataError(
            f"{run} was fitted to {data.name} itself: calibration needs rows that the fit has not "
            "seen; give another file, or hold rows out with doxa fit --calibrate"
        )
    for step in posterior.metadata.get("calibration", ()):
        if step.get("sha256") == digest:
            raise DataError(f"{run} was calibrated on {data.name} before; give other rows")
    return digest


def record_calibration(
    posterior: Any, asked: Calibration, file: str, digest: str, rows: int, seed: int
) -> None:
    """Add a calibration to the run's metadata. Scores from before it are removed, because they no
    longer hold."""
    step = {
        "kind": asked.kind, "level": asked.level, "conformal_kind": asked.guarantee,
        "file": file, "sha256": digest, "rows": rows, "seed": seed,
    }  # fmt: skip
    posterior.metadata["calibration"] = [*posterior.metadata.get("calibration", ()), step]
    posterior.metadata.pop("held_out_scores", None)
