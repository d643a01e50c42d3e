"""Between a posterior and what is stored: tensors and JSON, and the network's structure checked."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from doxa import checks, nets, store
from doxa.data import Standardisation, free_memory
from doxa.errors import ModelError, StoreError
from doxa.model import Model
from doxa.model.inspection import trainable
from doxa.model.layers import Site
from doxa.model.problem import Network
from doxa.posterior.base import Posterior, Record, Status
from doxa.posterior.kinds import posterior_class

FORMAT = 1


def to_artefact(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {k: v.detach().cpu().contiguous() for k, v in posterior.tensors().items()}
    scales = {name: _pack(tree, f"scale.{name}", tensors) for name, tree in _trees(posterior)}
    record = posterior.record
    tensors |= {f"stat.{k}": v.detach().cpu().contiguous() for k, v in record.stats.items()}
    plain = asdict(replace(record, stats={})) | {"status": str(record.status)}
    meta = {
        "format": FORMAT,
        "kind": posterior.kind,
        "method": store.encode(posterior.method, "method"),
        "likelihood": store.encode(posterior.base_likelihood, "likelihood"),
        "inputs": store.encode(posterior.inputs, "inputs"),
        "columns": posterior.columns,
        "scales": scales,
        "extra": store.encode(posterior.extra(), "extra"),
        "model": _model_meta(posterior.model, tensors),
        "record": store.encode(plain, "record"),
        "reason": record.status.reason,
    }
    return tensors, meta


def from_artefact(tensors: dict[str, Tensor], meta: dict[str, Any], net: nn.Module | None) -> Any:
    if meta.get("kind") == "draws":
        raise StoreError("the folder holds draws of a log density: doxa.Draws.load reads them")
    if meta.get("format") != FORMAT:
        raise StoreError(
            f"the artefact has format {meta.get('format')}; this version of doxa reads {FORMAT}"
        )
    cls = posterior_class(meta["kind"])
    method = store.decode(meta["method"], "method")
    likelihood = store.decode(meta["likelihood"], "likelihood")
    common = {
        "model": _rebuild(meta["model"], method, likelihood, tensors, net),
        "method": method,
        "likelihood": likelihood,
        "inputs": store.decode(meta["inputs"], "inputs"),
        "scales": Standardisation(**{k: _unpack(v, tensors) for k, v in meta["scales"].items()}),
    }
    posterior = cls.restore(common, tensors, store.decode(meta["extra"], "extra"))
    record = store.decode(meta["record"], "record")
    record["status"] = Status(record["status"], meta["reason"])
    record["stats"] = {k[5:]: v for k, v in tensors.items() if k.startswith("stat.")}
    posterior.record = Record(**record)
    posterior.columns = meta.get("columns")  # an older artefact has no such entry
    return posterior


def load(
    path: str | Path,
    net: nn.Module | None = None,
    device: torch.device | str = "cpu",
    draws_budget: int | None = None,
) -> Any:
    """A saved posterior.

    Parameters
    ----------
    path: the directory that `posterior.save` wrote.
    net: the network, when it was not made by a registered builder; its structure is checked.
    device: where it is to predict.
    draws_budget: bytes of memory for what was saved, else a quarter of what is free; where it is
        larger, draws stay in its files and are read as they are used.
    """
    budget = checks.budget("draws_budget", draws_budget)
    budget = free_memory(device) // 4 if budget is None else budget
    tensors, meta = store.read_artefact(path, budget)
    stay = _on_disk(tensors, budget)
    placed = {k: v if k in stay else v.to(device) for k, v in tensors.items()}
    return from_artefact(placed, meta, net)


def _on_disk(tensors: dict[str, Tensor], budget: int) -> set[str]:
    """Names of what is too large to be moved: draws."""
    if sum(v.nbytes for v in tensors.values()) <= budget:
        return set()
    return {name for name in tensors if name.rpartition(".")[2] == "samples"}


def _trees(posterior: Posterior) -> list[tuple[str, Any]]:
    s = posterior.scales
    return [("x_loc", s.x_loc), ("x_scale", s.x_scale), ("y_loc", s.y_loc), ("y_scale", s.y_scale)]


def _pack(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A tree of tensors as JSON that names them."""
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
        "sites": {name: [s.kind, list(s.shape), s.rows, s.use] for name, s in model.sites.items()},
        "masked": store.encode(model.masked, "masked"),
        "head": model.head,
        "widths": store.encode(model.widths, "widths"),
        "dtype": store.encode(model.dtype, "dtype"),
    }


def _rebuild(
    meta: dict[str, Any] | None,
    method: Any,
    likelihood: Any,
    tensors: dict[str, Tensor],
    net: nn.Module | None,
) -> Model | None:
    if meta is None:
        return None
    if net is None:
        builder = store.decode(meta["builder"], "builder")
        if builder is None:
            raise ModelError(
                "this posterior's network was not made by a registered builder: pass it as "
                "load(path, net=...)"
            )
        net = nets.build(*builder)
    named = store.decode(meta.get("named"), "named")  # an older artefact has no such entry
    subset = store.decode(meta["subset"], "subset")
    believed = Model(net, likelihood, store.decode(meta["prior"], "prior"), subset, output=named)
    believed.head = meta["head"]
    for name in ("output", "masked"):
        setattr(believed, name, store.decode(meta[name], name))
    return _with_state(method.prepare(Network(believed)).net, meta, tensors)


def _sites(meta: dict[str, Any]) -> dict[str, Site]:
    """The noise that layers take; an older artefact names dropout layers and their shapes."""
    if all(isinstance(v, list) and v and isinstance(v[0], str) for v in meta.values()):
        return {
            name: Site(kind, tuple(shape), *rest) for name, (kind, shape, *rest) in meta.items()
        }
    old = store.decode(meta, "sites")
    return {f"{layer}.uniform": Site("uniform", tuple(shape)) for layer, shape in old.items()}


def _with_state(model: Model, meta: dict[str, Any], tensors: dict[str, Tensor]) -> Model:
    dtype = store.decode(meta["dtype"], "dtype")
    for name in ("output", "masked"):
        setattr(model, name, store.decode(meta[name], name))
    model.sites = _sites(meta["sites"])
    model.head, model.widths = meta["head"], store.decode(meta["widths"], "widths")
    own = {e.name: list(e.shape) for e in trainable(model.net)[0]}
    saved = {n: shape for n, shape in meta["structure"] if not n.startswith("likelihood.")}
    if own != saved:
        differ = sorted(n for n in own.keys() | saved.keys() if own.get(n) != saved.get(n))[:5]
        detail = "; ".join(f"{n}: saved {saved.get(n)}, given {own.get(n)}" for n in differ)
        raise ModelError(f"the network's structure is not the saved one: {detail}")
    prefix = "net."
    fixed = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
    state = model.net.state_dict()
    missing = fixed.keys() - state.keys()
    if missing:
        raise ModelError(f"the network lacks the saved buffers {sorted(missing)[:5]}")
    model.net.load_state_dict(state | fixed)
    model.forget()
    places = {v.device for v in tensors.values()} - {torch.device("cpu")}  # draws may be on disk
    return model.to(places.pop() if places else "cpu", dtype)
