"""Transformer encoders on sequences of uneven length: torch's fused kernel and nested tensors,
which have no derivative and skip dropout, are kept out of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa

LENGTH = 7


class Reader(nn.Module):
    """Classifies sequences of 20 tokens; `pad` is True where a sequence has ended."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(16, 2)

    def forward(self, ids: Tensor, pad: Tensor) -> Tensor:
        h = self.encoder(self.embed(ids), src_key_padding_mask=pad)
        return self.head(h.masked_fill(pad.unsqueeze(-1), 0.0).mean(1))


class Counter(nn.Module):
    """The same, of token ids alone: 0 is padding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.reader = Reader(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        return self.reader(ids, ids == 0)


def sequences(rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, where they are padding, and whether there is a small one; the first row, which
    the model is built on, is short."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (rows, LENGTH), generator=g)
    length = torch.randint(2, LENGTH + 1, (rows, 1), generator=g)
    length[0], length[1] = 3, LENGTH
    pad = torch.arange(LENGTH) >= length
    ids = ids.masked_fill(pad, 0)
    return ids, pad, ((ids > 0) & (ids < 4)).any(1).long()


def network(kind: type[nn.Module] = Counter, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return kind(dropout)


SHORT: dict[str, tuple[Any, dict[str, Any]]] = {
    "map": ("map", {"steps": 20}),
    "deep-ensemble": ("deep-ensemble", {"steps": 20, "members": 2}),
    "sgld": (doxa.SGLD(4, 10, 2), {"members": 2}),
    "hmc": (doxa.HMC(draws=3, burn_in=3, leapfrog=2), {"members": 2}),
    "laplace": ("laplace", {"steps": 20, "subset": "last_layer"}),
    "mc-dropout": ("mc-dropout", {"steps": 20}),
    "mean-field": ("mean-field", {"steps": 20}),
}
QUICK = [("map", 0.1), ("sgld", 0.0), ("mc-dropout", 0.0), ("laplace", 0.0), ("hmc", 0.0)]
CASES = [
    pytest.param(name, p, marks=() if (name, p) in QUICK else pytest.mark.slow)
    for name in SHORT
    for p in (0.0, 0.1)
]


@pytest.mark.parametrize(("name", "dropout"), CASES)
def test_every_family_reads_padded_sequences(name: str, dropout: float) -> None:
    """With the mask among the inputs, whatever stands under it changes nothing."""
    ids, pad, y = sequences()
    method, options = SHORT[name]
    net = network(Reader, dropout)
    x = {"ids": ids, "pad": pad}
    posterior = doxa.fit(net, (x, y), method, likelihood="categorical", **options)
    assert posterior.status != "diverged"
    told = posterior.predict(x).samples
    other = posterior.predict({"ids": torch.where(pad, 19 - ids, ids), "pad": pad}).samples
    assert torch.isfinite(told).all()
    assert torch.allclose(told, other, atol=1e-5)
    assert told.std(1).min() > 0  # rows differ


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_outputs_are_torchs_own(dropout: float) -> None:
    """Those of the untouched network, by its fused kernel; torch's switches stay as they are."""
    ids, _, _ = sequences()
    net = network(dropout=dropout).eval()
    model = doxa.Model(net, "categorical").build(ids)
    with torch.no_grad():
        ours, theirs = model.forward({}, ids), net(ids)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()
    encoder = net.get_submodule("reader.encoder")
    assert encoder.use_nested_tensor
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_derivatives_are_those_of_the_untouched_network() -> None:
    """By torch.func, on weights that do not require grad: what takes them runs under vmap too."""
    ids, _, _ = sequences()
    net = network().eval()
    model = doxa.Model(net, "categorical").build(ids)
    weights = {name: p.detach() for name, p in net.named_parameters()}
    total = lambda w, rows: model.forward(w, rows).square().sum()  # noqa: E731
    ours = torch.func.grad(total)(weights, ids)
    each = torch.func.vmap(torch.func.grad(total), (None, 0))(weights, ids.unsqueeze(1))
    net(ids).square().sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None
        assert torch.allclose(ours[name], p.grad, atol=1e-4), name
        assert torch.allclose(each[name].sum(0), p.grad, atol=1e-4), name


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_masks_are_on_at_prediction(dropout: float) -> None:
    """One member: what differs between functions is their masks, which a fused layer skips."""
    ids, _, y = sequences()
    net = network(dropout=dropout)
    posterior = doxa.fit(net, (ids, y), "mc-dropout", likelihood="categorical", steps=20)
    assert posterior.status == "ok"
    assert posterior.predict(ids).samples.std(0).min() > 1e-3


@pytest.mark.parametrize("named", [False, True])
def test_attention_alone_has_derivatives_outside_training(named: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.attend(query=x, key=x, value=x)[0] if named else self.attend(x, x, x)[0]
            return self.head(h.mean(1))

    torch.manual_seed(0)
    x = torch.randn(12, 5, 4)
    posterior = doxa.fit(Attention(), (x, x.sum((1, 2))), doxa.SGLD(3, 4, 1), members=2)
    assert torch.isfinite(posterior.samples).all()
