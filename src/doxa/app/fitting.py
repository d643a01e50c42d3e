"""From a table to a saved posterior: what `doxa fit` and `doxa compare` share."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import doxa
from doxa import nets
from doxa.app.by_task import grouped
from doxa.app.cost import cost_words
from doxa.app.held_out import checksum
from doxa.app.schema import Schema
from doxa.app.settings import make_method
from doxa.app.tables import Array, check_name
from doxa.driver.holdout import FEWEST, parts
from doxa.errors import CorruptedArtefact, MethodError, ModelError, StoreError, did_you_mean
from doxa.likelihoods import assumed
from doxa.method import Method
from doxa.store import decode, decoding, is_artefact, read_artefact
from doxa.store.artefact import META, beside

ASKED = "asked.json"  # beside checkpoints: what their fit was asked


@dataclass(frozen=True)
class Plan:
    """What the user asked of a fit, besides data and method. None leaves it to the method."""

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
        """What `fit` is told about validation: 0 is all rows, nothing said is its default."""
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
) -> Any:
    """The posterior, with the schema in its metadata; tasks: which one each row belongs to."""
    chosen = make_method(method, settings)
    if schema.classes is not None and "classification" not in doxa.methods()[method].tasks:
        raise MethodError(
            f"method {method!r} is for regression only, and {schema.target!r} is a class; "
            "choose another method, or --likelihood gaussian for a number"
        )
    net = make_net(plan, schema.inputs, schema.outputs) if chosen.needs_network else None
    posterior = doxa.fit(
        net,
        (x, y) if tasks is None else grouped(x, y, tasks),
        chosen,
        likelihood=assumed(schema.likelihood) if schema.assumed else schema.likelihood,
        standardize=True,
        seed=plan.seed,
        validation=plan.held_out,
        checkpoint=None if checkpoint is None else str(checkpoint),
        checkpoint_every=checkpoint_every,
        progress=True,
        **plan.options(),
    )
    posterior.metadata["table"] = schema.to_json()
    posterior.metadata["method"] = method
    if net is not None and nets.builder_of(net) is None:
        posterior.metadata["net"] = plan.net
    return posterior


def say_held_out(plan: Plan, method: Method, rows: int) -> str:
    """What a person should know about the rows that are not trained on; "" if there are none."""
    off = "--validation 0 trains on all"
    if plan.validation:
        return f"{plan.validation:.0%} of the rows are held out to stop training in time; {off}"
    if plan.validation is None and method.holds_out and rows // parts(rows) >= FEWEST:
        what = f"each member holds out another {1 / parts(rows):.0%} of the rows"
        return f"{what}, to stop training in time and to judge the fit; {off}"
    return ""


def say_cost(plan: Plan, method: Method, schema: Schema, rows: int) -> str:
    """What a sampler will cost, before it starts; "" for other methods."""
    if method.gradients is None or not method.needs_network:
        return ""
    net = make_net(plan, schema.inputs, schema.outputs)
    return cost_words(method, plan.members, sum(p.numel() for p in net.parameters()), rows)


def provenance(data: Path, rows: int, plan: Plan, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a report needs to say where a posterior came from: kept in its metadata."""
    return {
        "source": {"file": data.name, "sha256": checksum(data), "rows": rows},
        "asked": {**asdict(plan), **asked},
        "versions": {
            "doxa": doxa.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def make_net(plan: Plan, inputs: int, outputs: int) -> nn.Module:
    """The default MLP, or what the user's `module:builder` gives for (inputs, outputs)."""
    if plan.net is None:
        return nets.mlp(inputs, outputs, plan.hidden)
    module_name, colon, function = plan.net.partition(":")
    if not colon or not function or module_name.endswith(".py"):
        raise ModelError(f"--net takes module:builder, such as mynets:wide, not {plan.net!r}")
    folder = os.getcwd()
    if folder not in sys.path:  # a module beside the data is what people mean
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


def load_run(run: Path, net: str | None = None) -> tuple[Any, Schema]:
    """A posterior that `doxa fit` saved, and its schema."""
    # The network's shape is in the schema, which must be read before the network can be made.
    saved = _read(run)
    with decoding(run):
        record = decode(saved.get("record", {}), "record")
        metadata = record.get("metadata") if isinstance(record, dict) else None
        if not isinstance(metadata, dict) or not isinstance(metadata.get("net"), str | None):
            raise StoreError(f"{run} does not hold what doxa fit saves beside a posterior")
        if "table" not in metadata:
            raise StoreError(f"{run} holds a posterior that was not fitted from a table")
        schema = Schema.from_json(metadata["table"])
    if net is not None and saved.get("model") is None:
        raise ModelError(f"{run} was fitted without a network: leave --net out")
    own = metadata.get("net")
    if own is not None and net is None:
        raise ModelError(f"{run} was fitted with a network of your own: pass --net {own}")
    made = None if net is None else make_net(Plan(net=net), schema.inputs, schema.outputs)
    return doxa.load(str(run), net=made), schema


def _read(run: Path) -> dict[str, Any]:
    """The facts of a run; a folder that is none is named as such."""
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
    """Check, before anything is read, that `out` may be written; give the checkpoint's place.

    A finished run is replaced only where that is asked for, and then when the new one is finished.
    The checkpoint lies beside `out` and not in it: saving replaces the whole folder at once.
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
    place = Path(os.path.abspath(out))
    if Path.cwd().is_relative_to(place):
        raise StoreError(f"{out} is the folder you are in, or holds it; give a run one of its own")
    named = place.with_name(place.name + ".checkpoint")
    return named if len(os.fsencode(named.name)) < 224 else beside(place, ".checkpoint")


def forget_checkpoint(checkpoint: Path) -> None:
    """The posterior is saved, or its fit given up: nothing is left to resume. What it was asked
    goes first, so that nobody goes on with half of it."""
    (checkpoint / ASKED).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
