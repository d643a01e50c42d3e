"""Low-rank adapters on a frozen network: only they are weights, and the network is shared."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import Adapted, adapted, sentences, trained
from scipy.stats import multivariate_normal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import doxa
from doxa.errors import ModelError

LORA = "*lora_*"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_evidence_of_an_adapter_is_exact() -> None:
    """y = W x + (α/r) B a(x) + ε with W and A frozen is linear in B: the evidence is
    N(y; Wx, σ²I + s²ΦΦᵀ) with Φ = (α/r) A x, to 1e-6. The frozen weights count nowhere."""
    torch.default_generator.manual_seed(0)
    layer = Adapted(nn.Linear(5, 1), rank=3, alpha=6.0).double()
    layer.lora_A.requires_grad_(False)
    x, y = numbers(30, 5), numbers(30, 1, seed=1)
    posterior = doxa.fit(
        layer, (x, y), doxa.Laplace(newton_steps=2), likelihood=doxa.Gaussian(noise=0.4),
        prior=doxa.Normal(0.7), init="given", validation=None, steps=5, subset=LORA,
    )  # fmt: skip
    phi = (2.0 * layer.lora_A["default"](x)).numpy()
    marginal = 0.4**2 * np.eye(30) + 0.7**2 * phi @ phi.T
    base = layer.base_layer(x).detach().numpy()[:, 0]
    exact = multivariate_normal(base, marginal).logpdf(y[:, 0].numpy())
    assert posterior.log_evidence == pytest.approx(exact, abs=1e-6)
    assert posterior.layout.names == ("lora_B.default.weight",)
    assert posterior.covariance.dense().shape == (1, 3, 3)


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that is made meanwhile."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() // t.element_size()
                 for t in tree_leaves(out) if isinstance(t, Tensor)]  # fmt: skip
        self.most = max([self.most, *sizes])
        return out


def test_a_frozen_network_is_not_copied_for_each_member() -> None:
    """Ten members on a frozen layer of 810,000 weights: no tensor of fit or prediction holds more
    numbers than that layer."""
    layers = [nn.Linear(3, 900), nn.Tanh(), nn.Linear(900, 900), nn.Linear(900, 1)]
    net = adapted(nn.Sequential(*layers), ("2",), rank=1)
    x, y = numbers(8, 3).float(), numbers(8, 1, seed=1).float()
    with Largest() as made:
        posterior = doxa.fit(
            net, (x, y), "deep-ensemble", members=10, steps=2, engine="stack:eager"
        )
        posterior.predict(x)
    assert posterior.layout.size == 1801  # the adapter, and the noise
    assert made.most == 810_000


def test_fresh_adapters_start_apart_and_add_nothing() -> None:
    """As the paper starts them: A drawn anew for each member, B zero, so that every member begins
    as the network that was given."""
    net = adapted(trained(steps=0))
    x, _ = sentences(8)
    model = doxa.Model(net, "categorical").build(x)
    starts = model.layout.unflatten(model.fresh([(0, 0), (0, 1)]))
    for name, value in starts.items():
        assert bool((value[0] != value[1]).all()) == ("lora_A" in name)
        assert bool((value == 0).all()) == ("lora_B" in name)
    one = {name: value[1] for name, value in starts.items()}
    torch.testing.assert_close(model.forward(one, x), net(x))


def test_dropout_masks_adapters_and_not_what_is_frozen() -> None:
    """Where B is zero, as at the start, a mask on adapters changes nothing; one on a frozen layer
    would. So every draw is the given network."""
    net = adapted(trained(steps=0))
    x, y = sentences(16)
    for subset in ("all", LORA):
        method = doxa.MCDropout(p=0.5, insert="all")
        posterior = doxa.fit(
            net, (x, y), method, init="given", steps=1, lr=1e-12, subset=subset,
            likelihood="categorical", validation=None,
        )  # fmt: skip
        drawn = posterior.predict(x, n=5).samples
        torch.testing.assert_close(drawn, net(x).expand(5, -1, -1), atol=1e-5, rtol=0)


def test_last_layer_vi_refuses_a_frozen_last_layer() -> None:
    net = adapted(trained(steps=0))
    with pytest.raises(ModelError, match="'classifier', is frozen"):
        doxa.fit(net, sentences(8), "last-layer-vi", likelihood="categorical", steps=1)


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "map": ("map", {}),
    "deep-ensemble": ("deep-ensemble", {"members": 3}),
    "laplace": ("laplace", {}),
    "diagonal": (doxa.Laplace("diagonal"), {}),
    "kronecker": (doxa.Laplace("kronecker"), {}),
    "mean-field": ("mean-field", {}),
    "mc-dropout": (doxa.MCDropout(p=0.1), {}),
    "swag": (doxa.SWAG(rank=3, cycle=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_methods_learn_adapters_of_a_trained_encoder(name: str, tmp_path: Path) -> None:
    """What the encoder was trained for does not help here (one of two classes by chance is 0.5):
    adapters and a new classifier do. The classifier is a point, the network given is untouched,
    and a saved posterior predicts the same."""
    method, options = METHODS[name]
    net = adapted(trained(), ("q_proj", "v_proj", "up"), rank=4)
    net.classifier.requires_grad_(True)  # type: ignore[union-attr]
    before = copy.deepcopy(net.state_dict())
    posterior = doxa.fit(
        net, sentences(150), method, init="given", subset=LORA, likelihood="categorical",
        steps=200, lr=0.02, **options,
    )  # fmt: skip
    x, y = sentences(100, seed=5)
    p = posterior.predict(x)
    assert (p.probs.argmax(1) == y).double().mean() > 0.65
    assert all("lora" in n or "classifier" in n for n in posterior.layout.names)
    assert set(posterior.network.subset_names) == {n for n in posterior.layout.names if "lora" in n}
    torch.testing.assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)
    posterior.save(str(tmp_path / "run"))
    fresh = adapted(trained(steps=0), ("q_proj", "v_proj", "up"), rank=4)
    fresh.classifier.requires_grad_(True)  # type: ignore[union-attr]
    loaded = doxa.load(str(tmp_path / "run"), net=fresh)
    torch.testing.assert_close(loaded.predict(x).probs, p.probs)


def test_peft_gives_the_same_posterior() -> None:
    """PEFT's own modules on the encoder, with the same adapters: the same evidence and predictive
    as those written here."""
    peft = pytest.importorskip("peft")
    own = adapted(trained(), ("q_proj", "v_proj"), rank=2)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    theirs = peft.get_peft_model(trained(), config)
    weights = {f"base_model.model.{k}": v for k, v in own.state_dict().items()}
    theirs.load_state_dict(weights)
    found = [
        doxa.fit(
            net.double(), sentences(), doxa.Laplace(newton_steps=3), init="given", subset=LORA,
            likelihood="categorical", prior=doxa.Normal(0.5), validation=None, steps=50,
        )
        for net in (own, theirs)
    ]  # fmt: skip
    assert found[0].layout.size == found[1].layout.size == 64
    assert found[1].log_evidence == pytest.approx(found[0].log_evidence, abs=1e-8)
    x, _ = sentences(20, seed=5)
    one, other = (p.predict(x, seed=0) for p in found)
    torch.testing.assert_close(one.probs, other.probs)
    starts = doxa.Model(theirs, "categorical").build(x).fresh([(0, 0), (0, 1)])
    starts = found[1].layout.unflatten(starts)
    assert all(bool((v == 0).all()) == ("lora_B" in k) for k, v in starts.items())
