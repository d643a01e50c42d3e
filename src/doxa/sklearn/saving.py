"""Saving and loading of estimators, as safetensors and JSON; a pickle holds the same bytes.

`made` builds the network of an estimator from a module or from a builder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from doxa import nets, store
from doxa.errors import ModelError, StoreError
from doxa.noise import drawing
from doxa.posterior.saving import from_artefact, rebuilt, to_artefact
from doxa.store.artefact import pack

if TYPE_CHECKING:
    from doxa.sklearn.estimator import BayesianEstimator


Builder = Callable[[int, int], nn.Module]  # (inputs, outputs) -> network


def made(net: nn.Module | Builder, inputs: int, outputs: int) -> nn.Module:
    """The network itself, or what its builder gives for (inputs, outputs)."""
    if isinstance(net, nn.Module):
        return net
    if not callable(net):
        raise ModelError(
            f"net is a torch.nn.Module or a builder (inputs, outputs) -> Module, not {net!r}"
        )
    try:
        built = net(inputs, outputs)
    except TypeError as error:
        raise ModelError(f"net was called as net({inputs}, {outputs}): {error}") from error
    if not isinstance(built, nn.Module):
        raise ModelError(f"net gave {type(built).__name__}, not a torch.nn.Module")
    return built


E = TypeVar("E", bound="BayesianEstimator")

KEY = "estimator"  # in a posterior's metadata
_OWN = "own"  # a network that no registered builder made
_PRIVATE = ("_outputs", "_flat")  # learned of y, for ourselves


def save(estimator: BayesianEstimator, path: str | Path, overwrite: bool | None = None) -> None:
    """Save the posterior, with the settings and attributes of the estimator in its metadata.

    A network is stored by its registered builder or not at all; a `RandomState` is stored as the
    seed that was drawn from it.
    """
    posterior = estimator.posterior_
    settings = estimator.get_params(deep=False)
    given = _given(estimator)
    if given is not None:
        settings["net"] = nets.builder_of(given) or _OWN
    if isinstance(settings["random_state"], np.random.RandomState):
        settings["random_state"] = posterior.record.seed
    stored = {
        "class": type(estimator).__name__,
        "settings": {k: store.encode(v, f"parameter {k}") for k, v in settings.items()},
        "fitted": {
            name: store.encode(_plain(value), name) for name, value in vars(estimator).items()
            if (name.endswith("_") or name in _PRIVATE) and name != "posterior_"
        },
    }  # fmt: skip
    posterior.metadata[KEY] = stored
    posterior.save(path, overwrite=overwrite)


def load(
    cls: type[E], path: str | Path, net: nn.Module | Builder | None, device: torch.device | str
) -> E:
    tensors, meta = store.read_artefact(path)
    with store.decoding(path):
        return _load(cls, path, tensors, meta, net, device)


def _load(
    cls: type[E], path: str | Path, tensors: dict[str, Tensor], meta: dict[str, Any],
    net: nn.Module | Builder | None, device: torch.device | str,
) -> E:  # fmt: skip
    stored = store.decode(meta.get("record", {}), "record").get("metadata", {}).get(KEY)
    if stored is None:
        raise StoreError(f"{path} holds a posterior, but no estimator: doxa.load reads it")
    if stored["class"] != cls.__name__:
        raise StoreError(f"{path} holds a {stored['class']}: {stored['class']}.load reads it")
    settings = {k: store.decode(v, f"parameter {k}") for k, v in stored["settings"].items()}
    built = settings.pop("net")
    if net is None and built not in (None, _OWN):
        net = rebuilt(built, tensors)
    estimator = cls(**settings, net=net)
    for name, value in stored["fitted"].items():
        if name not in _PRIVATE and (name.startswith("_") or not name.endswith("_")):
            raise StoreError(f"{path}: {name!r} is not a fitted attribute of an estimator")
        setattr(estimator, name, _array(store.decode(value, name)))
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    estimator.posterior_ = from_artefact(placed, meta, _given(estimator))
    return estimator


def to_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state for pickle: the posterior is replaced by the bytes that `save` writes."""
    if "posterior_" not in state:
        return state
    tensors, meta = to_artefact(state["posterior_"])
    kept = save_tensors(pack(tensors, {}).tensors)
    return {**state, "posterior_": {"tensors": kept, "meta": meta}}


def from_state(estimator: BayesianEstimator) -> None:
    kept = vars(estimator).get("posterior_")
    if isinstance(kept, dict):
        tensors = load_tensors(bytes(kept["tensors"]))
        estimator.posterior_ = from_artefact(tensors, kept["meta"], _given(estimator))


def _given(estimator: BayesianEstimator) -> nn.Module | None:
    """The user's network; None where there is none."""
    if estimator.net is None:
        return None
    with drawing("network"):  # what torch draws for it is replaced
        return made(estimator.net, estimator._inputs(), estimator._outputs)


def _plain(value: Any) -> Any:
    """What was learned of X and y, as JSON has it."""
    if not isinstance(value, np.ndarray):
        return value
    return {"values": value.tolist(), "dtype": value.dtype.str}


def _array(value: Any) -> Any:
    return np.array(value["values"], value["dtype"]) if isinstance(value, dict) else value
