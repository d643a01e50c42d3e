"""Plain attention in place of the fused one of transformers, against torch's own; and backbones
that name their classifier, as those of timm do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doxa
from doxa.model.layers import attention, unfuse_attention

Q, K, V = (torch.randn(2, 4, 5, 3, dtype=torch.float64) for _ in range(3))
SEEN = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
SEEN[1, 0, :, 0] = False
SEEN[1, 0, 0, 0] = True  # each position sees something
ADDED = torch.randn(2, 1, 5, 5, dtype=torch.float64)


@pytest.mark.parametrize("mask", [None, SEEN, ADDED])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_is_torchs(mask: Tensor | None, scaling: float | None) -> None:
    layer = nn.Module().eval()
    found, weights = attention(layer, Q, K, V, mask, scaling=scaling)
    expected = F.scaled_dot_product_attention(Q, K, V, mask, scale=scaling)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize("said", ["call", "layer"])
def test_attention_without_a_mask_is_causal_if_the_layer_is(said: str) -> None:
    layer: Any = nn.Module().eval()
    layer.is_causal = said == "layer"
    found, _ = attention(layer, Q, K, V, None, is_causal=True if said == "call" else None)
    expected = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_heads_that_share_keys() -> None:
    layer: Any = nn.Module().eval()
    layer.num_key_value_groups = 2
    found, _ = attention(layer, Q, K[:, :2], V[:, :2], SEEN)
    expected = F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], SEEN, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_a_bias_of_positions_is_added() -> None:
    found, _ = attention(nn.Module().eval(), Q, K, V, SEEN, position_bias=ADDED)
    both = ADDED.masked_fill(~SEEN, -torch.inf)
    expected = F.scaled_dot_product_attention(Q, K, V, both)
    torch.testing.assert_close(found, expected.transpose(1, 2))


class Chosen(nn.Module):
    """What a model of transformers shows of its attention."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=own)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name


@pytest.mark.parametrize("own", ["sdpa", "eager", "flash_attention_2"])
def test_only_the_default_attention_is_replaced(own: str) -> None:
    net = nn.Sequential(Chosen(own))
    unfuse_attention(net)
    try:
        import transformers.masking_utils  # noqa: F401

        expected = "doxa" if own == "sdpa" else own
    except ImportError:
        expected = own
    assert net[0].config._attn_implementation == expected


class Backbone(nn.Module):
    """Convolutions with a classifier, which it names as the models of timm do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)  # declared first, runs last
        self.stem, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward_features(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.stem(x)))

    def get_classifier(self) -> nn.Module:
        return self.fc

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.forward_features(x).mean((-2, -1)))


def classifier_is_last(net: Any, method: Any, subset: str | None) -> None:
    """The last layer is the classifier that the network names, for the subset and for features."""
    x, y = torch.randn(9, 3, 32, 32), torch.arange(9) % 3
    posterior = doxa.fit(
        net, (x, y), method, subset=subset, likelihood="categorical", init="given", steps=1,
        validation=None, progress=False,
    )  # fmt: skip
    named = dict(net.named_modules())
    assert named[posterior.model.head] is net.get_classifier()
    assert posterior.predict(x, n=2).probs.shape == (9, 3)
    if subset == "last_layer":
        head = f"{posterior.model.head}."
        assert set(posterior.model.subset_names) == {f"{head}weight", f"{head}bias"}
        width = net.get_classifier().in_features
        assert posterior.features(x).shape == (9, width)


@pytest.mark.parametrize("method", ["laplace", "last-layer-vi"])
def test_the_classifier_of_a_backbone_is_the_last_layer(method: str) -> None:
    classifier_is_last(Backbone(), method, "last_layer" if method == "laplace" else None)


TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 1, "embed_dim": 12, "num_heads": 2},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 8)},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in TIMM])
def test_the_classifiers_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed: pip install timm")
    net = timm.create_model(name, pretrained=False, num_classes=3, **TIMM[name])
    classifier_is_last(net, "laplace", "last_layer")
