"""Local reparametrisation and Flipout: the noise that weights would give, unbiased gradients of
less variance, and networks of which only some layers have it.

On a linear network with noise s the expectation of the ELBO's gradient is known:
by μ it is Xᵀ(y − Xμ)/s² − μ, by σ it is 1/σ − σ (1 + Σ x²/s²).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import doxa
from doxa.errors import ModelError
from doxa.method import Stage
from doxa.model.spread import exact_noise, with_spread

KINDS = ("weights", "local", "flipout")
MEMBERS, STEPS, STD, NOISE = 60, 50, 0.3, 0.8
DRAWS = MEMBERS * STEPS


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def conv() -> nn.Module:
    return nn.Conv1d(2, 2, 2, stride=2, padding=1, groups=2)


LAYERS: dict[str, tuple[Any, Tensor]] = {
    "linear": (lambda: nn.Linear(3, 2), normal(2, 3)),
    "conv": (conv, normal(2, 2, 4)),
    "embedding": (lambda: nn.Embedding(4, 2), torch.tensor([[0, 3], [1, 3]])),
}


@pytest.mark.parametrize("kind", ["local", "flipout"])
@pytest.mark.parametrize("name", LAYERS)
def test_rows_have_the_noise_of_weights_of_their_own(name: str, kind: str) -> None:
    """Covariances of all outputs over 20,000 draws. What weights give is J diag(σ²) Jᵀ with the
    Jacobian J of the outputs (they are linear in the weights). Rows are uncorrelated; places of one
    row are as under one weight (flipout) or uncorrelated (local). Five errors of a sample
    covariance of normals, or of products with signs, √(2 v_i v_j/n) at most times √3: 1e-6 each."""
    torch.manual_seed(1)
    build, x = LAYERS[name]
    plain = build().double()
    layer = with_spread(plain, kind)
    count = 20_000
    params = {k: v.detach() for k, v in plain.named_parameters()}
    stds = {k: 0.1 + 0.5 * torch.rand_like(v) for k, v in params.items()}
    ((site, (noise_kind, shape)),) = layer.noise(x).items()
    rows = normal(count, *shape, seed=2)
    given: dict[str, Tensor] = {site: rows if noise_kind == "normal" else rows.sigmoid()}
    for i, (k, std) in enumerate(stds.items()):
        eps = normal(count, *std.shape, seed=3 + i)
        given[f"{k}_away"] = eps * std if kind == "flipout" else std.square().expand_as(eps)
    y = vmap(lambda own: functional_call(layer, {**params, **own}, (x,)))(given)
    centre = plain(x).detach()
    jacobians = torch.func.jacrev(lambda p: functional_call(plain, p, (x,)))(params)
    wide = centre.numel()
    each = sum(
        jac.reshape(wide, -1) @ torch.diag(stds[k].flatten().square()) @ jac.reshape(wide, -1).T
        for k, jac in jacobians.items()
    )  # of one draw of the weights for all rows
    row = torch.arange(2).repeat_interleave(wide // 2)
    together = row[:, None] == row
    if kind == "local":
        together = torch.eye(wide, dtype=torch.bool)
    wanted = torch.where(together, each, 0.0)
    away = (y - centre).flatten(1)
    error = (each.diagonal()[:, None] * each.diagonal() * 6 / count).sqrt()
    assert ((away.mT @ away / count - wanted).abs() < 5 * error + 1e-12).all()
    assert (away.mean(0).abs() < 5 * (each.diagonal() / count).sqrt()).all()
    torch.testing.assert_close(functional_call(layer, params, (x,)), centre)  # no noise: plain


def rows() -> tuple[Tensor, Tensor]:
    x = normal(12, 2, seed=5)
    x[3] = 0.0  # an input that gives the noise no variance
    return x, (x @ torch.tensor([0.8, -0.5]).double()).unsqueeze(1) + normal(12, 1, seed=6)


FOUND: list[dict[str, Tensor]] = []


@dataclass(frozen=True)
class Estimates(doxa.MeanField):
    """Gradients of the ELBO where it starts, many of them; every second step, since those between
    have the same noise with the other sign."""

    name: ClassVar[str] = "mean-field-estimates"

    def stages(self, run: Any) -> Any:
        objective = self.objective(run)

        def step(run: Any, state: Any, batch: Any, clock: Any) -> Any:
            _, grads, _ = run.value_and_grad(objective, state, batch, clock, ("mean", "rho"))
            if int(clock.t) % 2 == 0:
                FOUND.append(grads)
            return state, {}

        yield Stage("estimates", step, 2 * STEPS, "all", over=("mean",), capturable=False)


@cache
def estimates(kind: str, hidden: bool = True) -> tuple[Tensor, Tensor]:
    """Gradients of the ELBO by μ and by σ, [draws, P] each."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)) if hidden else nn.Linear(
        2, 1, bias=False
    )  # fmt: skip
    return gradients(net.double(), rows(), kind)


def gradients(net: nn.Module, data: tuple[Tensor, Tensor], kind: str) -> tuple[Tensor, Tensor]:
    FOUND.clear()
    doxa.fit(
        net, data, Estimates(estimator=kind, initial_std=STD, average=0, elbo_samples=1),
        likelihood=doxa.Gaussian(NOISE), prior=doxa.Normal(1.0), init="given", members=MEMBERS,
        validation=None, engine="stack", progress=False,
    )  # fmt: skip
    mean, rho = (torch.cat([one[k] for one in FOUND]) for k in ("mean", "rho"))
    return mean, rho / STD  # σ = exp(ρ)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_on_a_linear_network_are_unbiased(kind: str) -> None:
    """Four numbers at 4.5 standard errors each: 3e-5 in all."""
    torch.manual_seed(0)
    mean = nn.Linear(2, 1, bias=False).double().weight.detach()[0]
    x, y = rows()
    by_mean = x.T @ (y[:, 0] - x @ mean) / NOISE**2 - mean
    by_std = 1 / STD - STD * (1 + x.square().sum(0) / NOISE**2)
    for got, wanted in zip(estimates(kind, False), (by_mean, by_std), strict=True):
        error = got.std(0) / DRAWS**0.5
        assert ((got.mean(0) - wanted).abs() < 4.5 * error).all()


@pytest.mark.parametrize("kind", ["local", "flipout"])
def test_gradients_of_a_network_are_those_of_weight_noise(kind: str) -> None:
    """26 numbers at 4.5 standard errors of the difference each: 2e-4 in all."""
    for got, other in zip(estimates(kind), estimates("weights"), strict=True):
        error = ((got.var(0) + other.var(0)) / DRAWS).sqrt()
        assert ((got.mean(0) - other.mean(0)).abs() < 4.5 * error).all()
        assert got.isfinite().all()


def test_noise_of_each_row_has_less_variance() -> None:
    """On a batch of 12 rows, both halves of the gradient; the two papers' claim."""
    for half in range(2):
        weights, local, flipout = (float(estimates(k)[half].var(0).sum()) for k in KINDS)
        assert local < 0.9 * flipout < 0.8 * weights


class Places(nn.Module):
    """A layer that several places of a row share, and the sum of what it gives."""

    def __init__(self, layer: nn.Module, call: Any) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x).flatten(1).sum(1, keepdim=True)


PLACES: dict[str, tuple[Any, Any, str | None]] = {
    "convolution": (lambda: nn.Conv1d(1, 1, 2), lambda f, x: f(x.reshape(-1, 1, 6)), "flipout"),
    "one patch": (lambda: nn.Conv1d(1, 1, 6), lambda f, x: f(x.reshape(-1, 1, 6)), "local"),
    "tokens": (lambda: nn.Linear(2, 1), lambda f, x: f(x), "flipout"),
    "one token": (lambda: nn.Linear(2, 1), lambda f, x: f(x[:, :1]), "local"),
    "twice": (lambda: nn.Linear(2, 1), lambda f, x: f(x[:, 0]) + f(x[:, 1]), "flipout"),
    "places as rows": (
        lambda: nn.Linear(2, 1), lambda f, x: f(x.flatten(0, 1)).reshape(len(x), -1), None,
    ),
    "places first": (lambda: nn.Linear(2, 1), lambda f, x: f(x.movedim(1, 0)).movedim(0, 1), None),
    "tokens and rows": (lambda: nn.Linear(2, 1), lambda f, x: f(x)[:, 0] + f(x[:, 0]), None),
    "words": (lambda: nn.Embedding(3, 1), lambda f, x: f((x > 0).long().sum(2)), "flipout"),
    "a word": (lambda: nn.Embedding(3, 1), lambda f, x: f((x > 0).long().sum(2)[:, 0]), "local"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["local", "flipout"])
@pytest.mark.parametrize("name", PLACES)
def test_gradients_are_unbiased_where_places_share_a_weight(name: str, kind: str) -> None:
    """Outputs are J θ, with J by autograd, so that the expected gradients are those of a linear
    network with the inputs J. At most 14 numbers at 4.5 standard errors each: 1e-4."""
    build, call, exact = PLACES[name]
    torch.manual_seed(0)
    net = Places(build(), call).double()
    x, y = normal(12, 3, 2, seed=5) + 0.7, normal(12, 1, seed=6)
    params = {k: p.detach() for k, p in net.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: functional_call(net, p, (x,))[:, 0])(params)
    matrix = torch.cat([jac.flatten(1) for jac in jacobians.values()], 1)
    theta = torch.cat([p.flatten() for p in params.values()])
    by_mean = matrix.T @ (y[:, 0] - matrix @ theta) / NOISE**2 - theta
    by_std = 1 / STD - STD * (1 + matrix.square().sum(0) / NOISE**2)
    for got, wanted in zip(gradients(net, (x, y), kind), (by_mean, by_std), strict=True):
        error = got.std(0) / DRAWS**0.5
        assert ((got.mean(0) - wanted).abs() < 4.5 * error + 1e-9).all()
    model = doxa.Model(net).build(x)
    assert exact_noise(model, "layer") == exact


class Mixed(nn.Module):
    """An embedding, a norm, a recurrent layer, a bare parameter and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.recurrent, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 1)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.norm(self.words(x)))[0][:, -1]) + self.shift


@pytest.mark.parametrize("kind", ["local", "flipout"])
def test_other_layers_keep_noise_on_weights(
    kind: str, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """Every weight has a deviation that moved, the log names those whose noise is not on rows, and
    a saved posterior predicts the same."""
    x = torch.randint(0, 5, (20, 6), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = Mixed()
    with caplog.at_level(logging.INFO, logger="doxa"):
        q = doxa.fit(
            net, (x, normal(20, 1).float()), doxa.MeanField(estimator=kind, samples=2), steps=3,
            validation=None, progress=False,
        )  # fmt: skip
    named = next(r.getMessage() for r in caplog.records if "not on rows" in r.getMessage())
    signed = [r.getMessage() for r in caplog.records if "flipout for words" in r.getMessage()]
    assert len(signed) == (kind == "local"), "six words of a row share their vectors"
    assert "recurrent.weight_ih_l0" in named and "shift" in named and "norm.weight" in named
    assert "head" not in named and "words" not in named
    assert (q.covariance.diagonal().sqrt() - 0.05).abs().min() > 1e-5
    q.save(tmp_path / "q")
    again = doxa.load(tmp_path / "q", net=net)
    torch.testing.assert_close(again.predict(x).mean, q.predict(x).mean)


class Turned(nn.Module):
    """Rows are not the first axis of what goes into the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.mixing = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixing(self.first(x).T.T.unsqueeze(0))[0]


class Tied(nn.Module):
    """A weight that is used besides the call of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.head = nn.Linear(2, 3), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.code(x)) @ self.code.weight)


@pytest.mark.parametrize("kind", ["local", "flipout"])
def test_what_does_not_fit_is_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    x, y = (t.float() for t in rows())
    with caplog.at_level(logging.INFO, logger="doxa"):
        doxa.fit(Turned(), (x, y), doxa.MeanField(estimator=kind), steps=1, progress=False)
    assert "noise on weights, not on rows, for mixing.weight, mixing.bias" in caplog.text
    with pytest.raises(
        ModelError, match="the weight of layer 'code' also without calling the layer"
    ):
        doxa.fit(Tied(), (x, y), doxa.MeanField(estimator=kind), steps=1, progress=False)
    with pytest.raises(ModelError, match="estimator='flipout' needs a linear"):
        net = nn.Sequential(nn.Flatten(), nn.LayerNorm(2))
        doxa.fit(net, (x, x), doxa.MeanField(estimator="flipout"), steps=1, progress=False)
