"""A posterior of adapters without the network that they adapt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from language import Writer, sentences, with_adapters
from torch import nn

import doxa
from doxa.errors import ModelError, StoreError
from doxa.evaluate import recalibrate
from doxa.text import next_token

X, Y = next_token(sentences())
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deep-ensemble": ("deep-ensemble", {"members": 3}),
    "swag": (doxa.SWAG(rank=2, cycle=1, average=0.5), {}),
    "ivon": ("ivon", {}),
    "kronecker": (doxa.Laplace("kronecker"), {}),
    "diagonal": (doxa.Laplace("diagonal"), {}),
    "mc-dropout": ("mc-dropout", {}),
}


def network(width: int = 8) -> nn.Module:
    """The same network with adapters each time."""
    torch.manual_seed(0)
    return with_adapters(Writer(width=width))


def fitted(net: nn.Module, name: str = "deep-ensemble", **options: Any) -> Any:
    method, own = METHODS[name]
    likelihood = doxa.Categorical(ignore_index=-100)
    return doxa.fit(
        net, (X, Y), method, likelihood=likelihood, steps=8, validation=None, progress=False,
        **{**own, **options},
    )  # fmt: skip


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("name", METHODS)
def test_adapters_are_saved_alone_and_predict_the_same(name: str, tmp_path: Path) -> None:
    posterior = fitted(network(), name)
    posterior.save(tmp_path / "whole")
    posterior.save(tmp_path / "alone", frozen=False)
    net = network()
    frozen = sum(4 * p.numel() for p in net.parameters() if not p.requires_grad)
    assert size(tmp_path / "whole") - size(tmp_path / "alone") >= frozen
    loaded = doxa.load(tmp_path / "alone", net=net)
    n = None if name == "deep-ensemble" else 5
    assert torch.equal(loaded.predict(X, n=n).probs, posterior.predict(X, n=n).probs)
    assert set(posterior.layout.names) == {n for n in posterior.layout.names if "lora" in n}


def test_the_size_does_not_depend_on_the_frozen_network(tmp_path: Path) -> None:
    """Members are rows of adapters; the embedding of 200 more words costs its checksum only."""
    torch.manual_seed(0)
    for words in (7, 207):
        net = with_adapters(Writer(words=words))
        fitted(net).save(tmp_path / str(words), frozen=False)
    assert abs(size(tmp_path / "207") - size(tmp_path / "7")) < 200


def test_another_network_is_an_error(tmp_path: Path) -> None:
    fitted(network()).save(tmp_path / "run", frozen=False)
    other: Any = copy.deepcopy(network())
    with torch.no_grad():
        other.words.weight[0, 0] += 1e-3
    with pytest.raises(ModelError, match=r"1 of 4, such as 'words\.weight'.*network of the fit"):
        doxa.load(tmp_path / "run", net=other)
    with pytest.raises(ModelError, match="net="):
        doxa.load(tmp_path / "run")


def test_a_network_in_another_type_is_cast_as_in_the_fit(tmp_path: Path) -> None:
    posterior = fitted(network(), dtype=torch.float64)
    posterior.save(tmp_path / "run", frozen=False)
    loaded = doxa.load(tmp_path / "run", net=network())
    assert torch.equal(loaded.predict(X).probs, posterior.predict(X).probs)


def test_a_corrected_posterior_holds_no_frozen_weights_either(tmp_path: Path) -> None:
    posterior = recalibrate(fitted(network()), next_token(sentences(seed=5)), "temperature")
    posterior.save(tmp_path / "whole")
    posterior.save(tmp_path / "alone", frozen=False)
    frozen = sum(4 * p.numel() for p in network().parameters() if not p.requires_grad)
    assert size(tmp_path / "whole") - size(tmp_path / "alone") >= 2 * frozen
    loaded = doxa.load(tmp_path / "alone", net=network())
    assert torch.equal(loaded.predict(X).probs, posterior.predict(X).probs)


def test_a_mixture_is_saved_whole(tmp_path: Path) -> None:
    mixed = doxa.MixturePosterior([fitted(network()), fitted(network())], [0.5, 0.5])
    with pytest.raises(StoreError, match="save its parts"):
        mixed.save(tmp_path / "run", frozen=False)
