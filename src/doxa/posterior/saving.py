"""Saving and loading of posteriors: tensors, JSON, and a check of the network's structure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from doxa import checks, nets, store
from doxa.data import FittedRows, Standardisation, free_memory
from doxa.engine.engine import default_modes
from doxa.errors import BaseMismatch, CorruptedArtefact, ModelError, StoreError
from doxa.likelihoods import Likelihood
from doxa.model import Model
from doxa.model.functional import Functional, made_small
from doxa.model.inspection import trainable
from doxa.model.layers import Site
from doxa.model.model import FACTS, Network
from doxa.noise import drawing
from doxa.posterior.base import Diagnostics, Posterior, Record, Status, leaves, posterior_class
from doxa.posterior.certificate import Certificate, fingerprint
from doxa.posterior.weights import BUFFERS

FORMAT = 1
_MOST_SETTINGS = 10_000
_MOST_CONSTANTS = 10_000_000  # largest number of buffer elements that are not stored


def to_artefact(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {k: v.detach().cpu().contiguous() for k, v in posterior.tensors().items()}
    scales = {name: _pack(tree, f"scale.{name}", tensors) for name, tree in _trees(posterior)}
    record = posterior.record
    tensors |= {f"stat.{k}": v.detach().cpu().contiguous() for k, v in record.stats.items()}
    rows = posterior.fitted_rows
    tensors |= {} if rows is None else {"fitted_rows": rows.hashes.detach().cpu()}
    tensors |= (
        {} if posterior.input_reference is None else {"input_reference": posterior.input_reference}
    )
    plain = asdict(replace(record, stats={}, certificate=None)) | {"status": str(record.status)}
    del plain["certificate"]  # it has an entry of its own
    meta = {
        "format": FORMAT,
        "kind": posterior.kind,
        "method": store.encode(posterior.method, "method"),
        "likelihood": store.encode(posterior.base_likelihood, "likelihood"),
        "inputs": store.encode(posterior.inputs, "inputs"),
        "columns": posterior.columns,
        "scalar_targets": posterior.scalar_targets,
        "fitted_rows": None if rows is None else rows.total,
        "scales": scales,
        "extra": store.encode(posterior.extra(), "extra"),
        "model": _model_meta(posterior.model, tensors),
        "record": store.encode(plain, "record"),
        "reason": record.status.reason,
        "certificate": posterior.certificate.to_json(),
    }
    return tensors, meta


def without_frozen(
    posterior: Posterior, tensors: dict[str, Tensor], meta: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An artefact without the parameters that are not trained; it has their checksums instead."""
    if meta["model"] is None:
        raise StoreError(
            f"frozen=False needs a posterior of one network, and a {posterior.kind} posterior has "
            "none of its own: save its parts"
        )
    sums = _frozen(posterior.model)
    outside = tuple(f"net.{name}" for name in sums)
    base = "base."  # a corrected posterior holds its network twice
    kept = {
        name: value
        for name, value in tensors.items()
        if name[len(base) * (name.startswith(base)) :] not in outside
    }
    return kept, {**meta, "model": {**meta["model"], "frozen": sums}}


def _frozen(model: Model | None) -> dict[str, str]:
    """{name: checksum} of the parameters that are not trained."""
    assert model is not None
    frozen = {name for name, p in model.net.named_parameters() if not p.requires_grad}
    return {name: checksum(model.fixed[name]) for name in model.fixed if name in frozen}


def checksum(values: Tensor) -> str:
    """The SHA-256 of a tensor's shape, type and bytes."""
    digest = hashlib.sha256(repr((tuple(values.shape), str(values.dtype))).encode())
    flat = values.detach().reshape(-1)
    for piece in flat.split(1 << 24):
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_frozen(model: Model, sums: Any) -> None:
    """Check that the given network has the parameters that were not saved."""
    if not isinstance(sums, dict):
        raise StoreError("the checksums of the frozen parameters are damaged")
    own = _frozen(model)
    wrong = sorted(name for name in sums.keys() | own.keys() if sums.get(name) != own.get(name))
    if wrong:
        raise BaseMismatch(
            f"the posterior was saved without its frozen parameters, and those of the network are "
            f"others ({len(wrong)} of {len(sums)}, such as {wrong[0]!r}): pass the network of the "
            "fit, doxa.load(path, net=...)"
        )


def from_artefact(tensors: dict[str, Tensor], meta: dict[str, Any], net: nn.Module | None) -> Any:
    with store.decoding("the artefact"):
        return _from_artefact(tensors, meta, net)


def _from_artefact(tensors: dict[str, Tensor], meta: dict[str, Any], net: nn.Module | None) -> Any:
    if meta.get("kind") == "draws":
        raise StoreError("the folder holds draws of a log density: load them with doxa.Draws.load")
    if meta.get("format") != FORMAT:
        raise StoreError(
            f"the artefact has format {meta.get('format')}; this version of doxa reads {FORMAT}"
        )
    cls = posterior_class(meta["kind"])
    check_finite_tensors(tensors, cls.may_be_infinite)
    method = store.decode(meta["method"], "method")
    likelihood = store.decode(meta["likelihood"], "likelihood")
    if not isinstance(likelihood, Likelihood) or not callable(getattr(method, "prepare", None)):
        raise StoreError("the artefact names no likelihood, or no method")
    inputs = store.decode(meta["inputs"], "inputs")
    _check_shapes_of_rows(inputs)
    common = {
        "model": _rebuild(meta["model"], method, likelihood, inputs, tensors, net),
        "method": method,
        "likelihood": likelihood,
        "inputs": inputs,
        "scales": Standardisation(**{k: _unpack(v, tensors) for k, v in meta["scales"].items()}),
    }
    posterior = cls.restore(common, tensors, store.decode(meta["extra"], "extra"))
    stats = {k[5:]: v for k, v in tensors.items() if k.startswith("stat.")}
    posterior.record = read_record(store.decode(meta["record"], "record"), meta["reason"], stats)
    columns = meta.get("columns")  # an older artefact has no such entry
    if columns is not None and not (
        isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    ):
        raise StoreError("the columns of x are not a list of names")
    posterior.columns = columns
    posterior.scalar_targets = _read_scalar(meta.get("scalar_targets", False))
    if meta.get("fitted_rows") is not None:
        posterior.fitted_rows = _read_fitted(tensors["fitted_rows"], meta["fitted_rows"])
    if meta.get("certificate") is not None:  # an older artefact has none
        _read_certificate(posterior, tensors.get("input_reference"), meta["certificate"])
    posterior.check_restored()
    return posterior


def _read_certificate(posterior: Posterior, reference: Tensor | None, saved: Any) -> None:
    """The saved certificate, compared with its checksum and with the artefact it lies in."""
    found = Certificate.from_json(saved)
    if reference is not None and (reference.dtype != torch.float32 or reference.ndim != 2):
        raise CorruptedArtefact("the reference of the certificate is no table of float32")
    posterior.input_reference = None if reference is None else reference.cpu()
    posterior.record.certificate = found
    own = {"data": posterior._fingerprint(), "reference": fingerprint(posterior.input_reference)}
    for name, value in own.items():
        unknown = name == "data" and not value  # the rows of the fit were not saved
        if getattr(found, name) != value and not unknown:
            raise CorruptedArtefact(
                f"the certificate of the run is of another run: its entry {name!r} does not "
                "match; use another copy of the run"
            )


# Statuses that were renamed since artefacts were written.
_STATUSES = {"learned-nothing": "prior-collapse"}


def _current(plain: dict[str, Any]) -> dict[str, Any]:
    """A saved record by its current names."""
    status, found = plain["status"], plain.get("diagnostics")
    if isinstance(status, str):
        plain = plain | {"status": _STATUSES.get(status, status)}
    if isinstance(found, dict):
        moved = found.get("centre")
        found = found | ({} if moved is None else {"centre": moved == "mean"})
        plain = plain | {
            "diagnostics": {Diagnostics.renamed.get(k, k): v for k, v in found.items()}
        }
    return plain


def read_record(plain: dict[str, Any], reason: Any, stats: dict[str, Tensor]) -> Record:
    """The saved record, with the types of its entries checked."""
    plain = _current(plain)
    record = Record(**plain | {"status": Status(plain["status"], reason), "stats": stats})
    kinds: dict[str, Any] = {
        "history": dict, "diagnostics": dict, "metadata": dict, "validation": float | None,
    }  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(getattr(record, name), kind):
            raise StoreError(f"{name} of the record is {getattr(record, name)!r:.60}")
    shown: dict[str, Any] = {
        "engine": str, "mode": str | None, "engine_reason": str, "precision": str,
        "seconds": float | int, "steps": int, "rows": int, "held_out": dict,
        "held_out_calibration": dict, "stopping": dict, "warnings": list, "elbo_error": float,
        "yardsticks": dict, "alternatives": dict, "trunk": str, "blocks": dict, "threads": int,
        "processes": dict,
    }  # fmt: skip
    for name, kind in shown.items():
        if name in record.diagnostics and not isinstance(record.diagnostics[name], kind):
            raise StoreError(f"{name} of the record is {record.diagnostics[name]!r:.60}")
    for key, value in record.diagnostics.get("held_out", {}).items():
        if not isinstance(value, str if key == "by" else int | float):
            raise StoreError(f"{key} of held_out of the record is {value!r:.60}")
    record.diagnostics = Diagnostics(record.diagnostics)
    if not isinstance(reason, str) or type(plain["status"]) is not str:
        raise StoreError("the status of the record is not a string")
    if type(record.seed) is not int or not -(1 << 63) <= record.seed < 1 << 64:
        raise StoreError(f"the seed of the record is {record.seed!r:.60}")
    return record


def _read_scalar(saved: Any) -> bool | tuple[bool, ...]:
    """The saved `scalar_targets`, checked."""
    if isinstance(saved, list | tuple) and all(type(one) is bool for one in saved):
        return tuple(saved)
    if type(saved) is not bool:
        raise StoreError(f"scalar_targets of the artefact is {saved!r:.60}")
    return saved


def _read_fitted(hashes: Tensor, total: Any) -> FittedRows:
    """The hashes of fitted rows; they must be sorted, and not more than the number of rows."""
    whole = type(total) is int and hashes.ndim == 1 and hashes.dtype == torch.int64
    if not whole or not 0 < len(hashes) <= total or bool((hashes[1:] < hashes[:-1]).any()):
        raise StoreError("the hashes of fitted rows are damaged")
    return FittedRows(hashes, total)


def check_finite_tensors(tensors: dict[str, Tensor], infinite: Collection[str] = ()) -> None:
    """Raise where a tensor holds NaN, or an infinity that is not allowed by `infinite`.

    `stat.*`, the statistics of a sampler, may hold any value. The parts of a mixture are checked
    when they are rebuilt.
    """
    for name, value in tensors.items():
        if name.startswith(("stat.", "base.", "part")) or name in infinite:
            continue
        if value.is_complex() or (value.is_floating_point() and value.itemsize < 2):
            raise StoreError(f"tensor {name!r} is of {value.dtype}, which no posterior uses")
        if value.is_floating_point():
            flat = value.reshape(-1)
            if not all(bool(torch.isfinite(piece).all()) for piece in flat.split(1 << 22)):
                raise StoreError(f"tensor {name!r} holds NaN or infinite numbers")


def _check_shapes_of_rows(inputs: Any) -> None:
    """Check the shape of one row of x, or a tree of shapes: nonnegative integers."""
    if isinstance(inputs, dict):
        inputs = [inputs[name] for name in inputs if isinstance(name, str)]
    for size in inputs or ():
        if isinstance(size, list | tuple):
            _check_shapes_of_rows(size)
        elif type(size) is not int or not 0 <= size < 1 << 40:
            raise StoreError(f"the artefact has an invalid shape of rows of x: {inputs!r:.60}")


@default_modes()
def load(
    path: str | Path,
    net: nn.Module | None = None,
    device: torch.device | str = "cpu",
    draws_budget: int | None = None,
) -> Any:
    """Load a saved posterior.

    Parameters
    ----------
    path : str or Path
        The directory that `posterior.save` wrote.
    net : nn.Module, optional
        The network, if no registered builder made it; its structure is checked.
    device : torch.device or str, optional
        The device of predictions.
    draws_budget : int, optional
        Bytes of memory for the saved tensors; default: a quarter of the free memory. If they are
        larger, draws stay on disk and are read when they are used.
    """
    budget = checks.budget("draws_budget", draws_budget)
    budget = free_memory(device) // 4 if budget is None else budget
    tensors, meta = store.read_artefact(path, budget)
    stay = _on_disk(tensors, budget)
    placed = {k: v if k in stay else v.to(device) for k, v in tensors.items()}
    with store.decoding(path):
        return _from_artefact(placed, meta, net)


def _on_disk(tensors: dict[str, Tensor], budget: int) -> set[str]:
    """Names of the tensors that stay on disk because they are too large: draws."""
    if sum(v.nbytes for v in tensors.values()) <= budget:
        return set()
    return {name for name in tensors if name.rpartition(".")[2] == "samples"}


def _trees(posterior: Posterior) -> list[tuple[str, Any]]:
    s = posterior.scales
    return [("x_loc", s.x_loc), ("x_scale", s.x_scale), ("y_loc", s.y_loc), ("y_scale", s.y_scale)]


def _pack(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A tree of tensors as JSON with their names."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {"dict": {k: _pack(v, f"{name}.{k}", tensors) for k, v in tree.items()}}
    if isinstance(tree, list | tuple):
        return {"tuple": [_pack(v, f"{name}.{i}", tensors) for i, v in enumerate(tree)]}
    tensors[name] = torch.as_tensor(tree).detach().cpu()
    return {"tensor": name}


def _unpack(data: Any, tensors: dict[str, Tensor]) -> Any:
    if data is None:
        return None
    if "dict" in data:
        return {k: _unpack(v, tensors) for k, v in data["dict"].items()}
    if "tuple" in data:
        return tuple(_unpack(v, tensors) for v in data["tuple"])
    return tensors[data["tensor"]]


def _model_meta(model: Model | None, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    if model is None:
        return None
    tensors |= {f"net.{k}": v.detach().cpu().contiguous() for k, v in model.fixed.items()}
    subset = model.subset if isinstance(model.subset, str) else model.subset_names
    return {
        "builder": store.encode(model.builder, "the network's builder"),
        "prior": store.encode(model.prior, "prior"),
        "subset": store.encode(subset, "subset"),
        "structure": [[e.name, list(e.shape)] for e in model.layout.entries],
        "output": store.encode(model.output, "output"),
        "named": store.encode(model.named, "named"),
        "at_rest": list(model.at_rest),
        "trunk": list(model.given_trunk),
        "sites": _sites_meta(model.sites),
        "masked": store.encode(model.masked, "masked"),
        "head": model.head,
        "widths": store.encode(model.widths, "widths"),
        "calls": store.encode(model.calls, "calls"),
        "dtype": store.encode(model.dtype, "dtype"),
        "given": _facts_meta(model.given_facts),
    }


def _facts_meta(facts: dict[str, Any] | None) -> dict[str, Any] | None:
    """`Model.facts` of the network before the method's `prepare`."""
    if facts is None:
        return None
    rest = {name: value for name, value in facts.items() if name != "sites"}
    return {"sites": _sites_meta(facts["sites"]), "rest": store.encode(rest, "the network's facts")}


def _sites_meta(sites: dict[str, Site]) -> dict[str, list[Any]]:
    return {name: [s.kind, list(s.shape), s.rows, s.use] for name, s in sites.items()}


def _rebuild(
    meta: dict[str, Any] | None,
    method: Any,
    likelihood: Any,
    inputs: Any,
    tensors: dict[str, Tensor],
    net: nn.Module | None,
) -> Model | None:
    if meta is None:
        return None
    named = store.decode(meta.get("named"), "named")  # an older artefact has no such entry
    trunk = _names(meta.get("trunk", [])) or None  # nor such
    subset = store.decode(meta["subset"], "subset")
    prior = store.decode(meta["prior"], "prior")

    def prepared(own: nn.Module) -> Model:
        """The network as the method's `prepare` makes it from the facts of the fit."""
        facts = _facts(meta)
        given = Model(own, likelihood, prior, subset, output=named, trunk=trunk)
        for name, value in facts.items():
            setattr(given, name, value)
        given.derive()
        model: Model = method.prepare(Network(given)).net
        model.given_facts = None if meta.get("given") is None else facts
        return model

    if net is None:
        builder = store.decode(meta["builder"], "builder")
        if builder is None:
            raise ModelError(
                "this posterior's network was not made by a registered builder: pass it as "
                "load(path, net=...)"
            )
        name, settings = _checked_builder(builder)
        _check_sizes(lambda: prepared(nets.build(name, settings)), meta, inputs, tensors)
        with drawing("network"):  # what torch draws for it is replaced
            net = nets.build(name, settings)
    with drawing("network"):  # the same for layers that the method brings
        model = prepared(net)
    return _with_state(model, meta, tensors)


def _checked_builder(builder: Any) -> tuple[str, dict[str, Any]]:
    """The builder's name and settings, checked. Their number is limited, as each may become a
    layer."""
    name, settings = builder
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise StoreError("the network's builder is not a name with settings")
    if len(leaves(settings)) > _MOST_SETTINGS:
        raise StoreError(f"the network's builder has more than {_MOST_SETTINGS:,} settings")
    return name, settings


def rebuilt(builder: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """The network of a stored builder; it may not have more weights than stored numbers."""
    name, settings = _checked_builder(builder)
    made_small(
        lambda: Functional(nets.build(name, settings)), sum(v.numel() for v in tensors.values())
    )
    with drawing("network"):  # what torch draws for it is replaced
        return nets.build(name, settings)


def _check_sizes(
    make: Callable[[], Model], meta: dict[str, Any], inputs: Any, tensors: dict[str, Tensor]
) -> None:
    """Check that the builder's settings make the saved network.

    The check runs on the meta device, where tensors have shapes but no memory, so that settings of
    a huge network cannot exhaust the memory. A builder that cannot run there is accepted, because
    builders are code of the user.
    """
    try:
        with torch.device("meta"):
            model = make()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        return
    most = sum(value.numel() for value in tensors.values())
    size = sum(t.numel() for t in model.net.parameters())
    if size > most or sum(t.numel() for t in model.net.buffers()) > most + _MOST_CONSTANTS:
        raise ModelError(
            f"the settings of the saved network give {size:,} numbers, but the artefact holds "
            f"{most:,}: the structure is not the saved one"
        )
    _check_structure(model, meta)
    try:
        with torch.device("meta"):
            seen = model.build(each_shape(inputs, lambda shape: torch.zeros(1, *shape)))
    except Exception:  # tokens, or an operation without a meta kernel
        return
    kept, own = _sites(meta["sites"]), seen.sites
    if "calls" not in meta:  # an older artefact, whose layers may have had other noise in training
        kept, own = _in_prediction(kept), _in_prediction(own)
    saved = {"output": _plain(store.decode(meta["output"], "output")), "head": meta["head"],
             "sites": kept}  # fmt: skip
    found = {"output": _plain(seen.output), "head": seen.head, "sites": own}
    for name, value in found.items():
        if saved[name] != value:
            raise ModelError(
                f"the network's structure is not the saved one: {name} {value!r:.80}, saved "
                f"{saved[name]!r:.80}"
            )


def each_shape(tree: Any, make: Callable[[Any], Any]) -> Any:
    """Apply `make` to each shape in the tree of shapes of one row of x."""
    if isinstance(tree, dict):
        return {name: make(shape) for name, shape in tree.items()}
    if isinstance(tree, tuple) or (isinstance(tree, list) and tree and isinstance(tree[0], list)):
        return tuple(make(shape) for shape in tree)
    return make(tree)


def _is_output(tree: Any) -> bool:
    """Whether it is a shape, a tuple of shapes (heads), or None (the network has not run)."""
    if not isinstance(tree, tuple | list):
        return tree is None
    whole = [type(size) is int and 0 <= size < 1 << 31 for size in tree]
    return all(whole) or (not any(whole) and all(v is not None and _is_output(v) for v in tree))


def _plain(tree: Any) -> Any:
    return [_plain(v) for v in tree] if isinstance(tree, list | tuple) else tree


def _calls(meta: dict[str, Any]) -> dict[str, Any]:
    """The inputs of each layer for one row; older artefacts have none."""
    calls = store.decode(meta.get("calls"), "calls") or {}
    return {str(name): tuple(each) for name, each in calls.items()}


def _sites(meta: dict[str, Any]) -> dict[str, Site]:
    """The noise sites of layers; older artefacts hold dropout layers and their shapes."""
    if all(isinstance(v, list) and v and isinstance(v[0], str) for v in meta.values()):
        return {
            name: Site(kind, tuple(shape), *rest) for name, (kind, shape, *rest) in meta.items()
        }
    old = store.decode(meta, "sites")
    return {f"{layer}.uniform": Site("uniform", tuple(shape)) for layer, shape in old.items()}


def _facts(meta: dict[str, Any]) -> dict[str, Any]:
    """`Model.facts` of the network before the method's `prepare`. Where they are not saved, in an
    older artefact or because `prepare` changes nothing, those of the prepared network."""
    if meta.get("given") is None:
        same = {name: store.decode(meta[name], name) for name in ("output", "masked", "widths")}
        own = {"at_rest": _names(meta.get("at_rest", []))}
        return same | {"head": meta["head"], "calls": _calls(meta)} | own
    facts = store.decode(meta["given"]["rest"], "the network's facts")
    aside = {"sites", "at_rest"}  # the second one is in no older artefact
    if not isinstance(facts, dict) or facts.keys() | aside != {*FACTS}:
        raise StoreError("the artefact lacks what the method saw of the network")
    at_rest = _names(facts.get("at_rest", ()))
    return facts | {"sites": _sites(meta["given"]["sites"]), "at_rest": at_rest}


def _names(saved: Any) -> tuple[str, ...]:
    """Saved names of layers, checked."""
    if not isinstance(saved, list | tuple) or not all(isinstance(name, str) for name in saved):
        raise StoreError(f"the frozen layers of the artefact are {saved!r:.60}")
    return tuple(saved)


def _in_prediction(sites: dict[str, Site]) -> dict[str, Site]:
    """The noise sites as prediction uses them: per function, not per training row."""
    return {name: Site(s.kind, s.shape) for name, s in sites.items() if s.use != "training"}


def _check_structure(model: Model, meta: dict[str, Any]) -> None:
    own = {e.name: list(e.shape) for e in trainable(model.net)[0]}
    saved = {n: shape for n, shape in meta["structure"] if not n.startswith("likelihood.")}
    if own != saved:
        differ = sorted(n for n in own.keys() | saved.keys() if own.get(n) != saved.get(n))[:5]
        detail = "; ".join(f"{n}: saved {saved.get(n)}, given {own.get(n)}" for n in differ)
        raise ModelError(f"the network's structure is not the saved one: {detail}")


def _with_state(model: Model, meta: dict[str, Any], tensors: dict[str, Tensor]) -> Model:
    dtype = store.decode(meta["dtype"], "dtype")
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise StoreError(f"the artefact has an invalid dtype of the network: {dtype!r:.40}")
    for name in ("output", "masked"):
        setattr(model, name, store.decode(meta[name], name))
    if not _is_output(model.output):
        raise StoreError(f"the artefact has an invalid output shape: {model.output!r:.60}")
    model.sites = _sites(meta["sites"])
    model.head, model.widths = meta["head"], store.decode(meta["widths"], "widths")
    model.calls = _calls(meta)
    model.at_rest = _names(meta.get("at_rest", []))
    unknown = set(model.at_rest) - {name for name, _ in model.net.named_modules()}
    if unknown:
        raise ModelError(
            f"the network has no layer {min(unknown)!r}, which is frozen in the saved one"
        )
    if not all(isinstance(n, str) and type(w) is int and 0 <= w < 1 << 40 for n, w in model.widths):
        raise StoreError("the widths of layers are not pairs of names and integers")
    _check_structure(model, meta)
    prefix = "net."
    fixed = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
    state = model.net.state_dict()
    # a buffer with persistent=False is in no state_dict
    aside = {k: v for k, v in model.net.named_buffers() if k not in state and k in fixed}
    missing = fixed.keys() - state.keys() - aside.keys()
    missing |= {k for k, v in aside.items() if fixed[k].shape != v.shape}
    if missing:
        raise ModelError(f"the network lacks the saved buffers {sorted(missing)[:5]}")
    wrong = [k for k, v in fixed.items() if k in state and v.shape != state[k].shape]
    if wrong:
        raise ModelError(f"the saved buffer {wrong[0]!r} has another shape than the network's")
    model.net.load_state_dict(state | {k: v for k, v in fixed.items() if k in state})
    for name, value in aside.items():
        value.copy_(fixed[name])
    model.written = tuple(  # buffers of each member, which training changed
        name for k in tensors if k.startswith(BUFFERS)
        and (name := k[len(BUFFERS) :]) not in model.momenta
    )  # fmt: skip
    model.derive()
    places = {v.device for v in tensors.values()} - {torch.device("cpu")}  # draws may be on disk
    placed = model.to(places.pop() if places else "cpu", dtype)
    if meta.get("frozen") is not None:  # parameters that were not saved
        _check_frozen(placed, meta["frozen"])
    return placed
