"""Layers that take noise, give terms and have trainables of their own: the same in a loop, under
vmap and in their batched form, and nothing is mutated."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.engine import Engine
from doxa.errors import ModelError
from doxa.model import MethodLayer, Model, Site

M, N = 3, 5


class Jittered(MethodLayer, nn.Linear):
    """y = W(x + s ε) + b with s learned by the layer; gives ½ Σ s² and the mean of its input."""

    own = ("s",)
    gives = ("penalty", "seen")

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.s = nn.Parameter(torch.full((inputs,), 0.5))
        for name in ("eps", *self.gives):
            self.register_buffer(name, None)

    def noise(self, x: Tensor) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {"eps": ("normal", tuple(x.shape))}

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = 0.5 * self.s.square().sum()
        self.seen = x.mean(0)
        return super().forward(x if self.eps is None else x + self.s * self.eps)


class Batched(Jittered):
    inner = nn.Linear

    def batched(self, h: Tensor, has_axis: bool, slots: Any, inner: Any) -> tuple[Tensor, bool]:
        s, eps = slots.take("s"), slots.take("eps")
        lead = s if slots.has_axis("s") else s.unsqueeze(0)
        slots.give("penalty", 0.5 * lead.square().sum(1).expand(M))
        seen = h.mean(1 if has_axis else 0)
        slots.give("seen", seen if has_axis else seen.expand(M, -1))
        if eps is None:
            return inner(h, has_axis)
        return inner(h + lead.unsqueeze(1) * eps, True)


def model(layer: type[nn.Module]) -> Model:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def rule(name: str, plain: nn.Module) -> nn.Module | None:
        return layer(6, 2) if name == "2" else None

    changed = Model(net).rewrite(rule)
    return changed.to("cpu", torch.float64).build(torch.zeros(1, 4).double())


def tensors(built: Model) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    params = built.layout.unflatten(draw(M, built.layout.size))
    own = built.layers.unflatten(draw(M, built.layers.size))
    return {**params, **own}, {"2.eps": draw(M, N, 6)}, draw(N, 4)


def test_what_a_layer_declares_is_found() -> None:
    built = model(Jittered)
    assert built.sites == {"2.eps": Site("normal", (6,), 1)}
    assert built.terms == ("2.penalty", "2.seen")
    assert built.layers.names == ("2.s",)
    assert "2.s" not in built.layout.names
    assert built.sites["2.eps"].drawn(7) == (7, 6)
    assert built.sites["2.eps"].drawn(None) == (1, 6)  # one draw for a whole function


def test_trainables_of_layers_start_anew_and_have_no_prior() -> None:
    built = model(Jittered)
    assert built.bound_prior.size == built.layout.size
    rows = built.fresh_layers([(0, 0), (0, 1)])
    assert rows.shape == (2, 6)  # a bare parameter is not reset: both start from what is given


@pytest.mark.parametrize("layer", [Jittered, Batched])
@pytest.mark.parametrize(
    "engine", [Engine("stack"), Engine("stack", native=False), Engine("loop")], ids=str
)
def test_all_forms_agree(layer: type[nn.Module], engine: Engine) -> None:
    built = model(layer)
    assert (built.plan is None) is (layer is Jittered)
    params, noise, x = tensors(built)
    got = engine.apply(built, params, x, buffers=noise)
    for m in range(M):
        own = {k: v[m] for k, v in params.items()}
        hidden = torch.tanh(x @ own["0.weight"].T + own["0.bias"])
        moved = hidden + own["2.s"] * noise["2.eps"][m]
        want = moved @ own["2.weight"].T + own["2.bias"]
        assert torch.allclose(got.f[m], want, rtol=1e-12)
        assert torch.allclose(got.terms["2.penalty"][m], 0.5 * own["2.s"].square().sum())
        assert torch.allclose(got.terms["2.seen"][m], hidden.mean(0), rtol=1e-12)
    quiet = engine.apply(built, params, x)
    assert not torch.allclose(quiet.f, got.f)


def test_gradients_flow_through_terms_and_noise() -> None:
    built = model(Jittered)
    params, noise, x = tensors(built)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    out = Engine("stack").apply(built, leaves, x, buffers=noise)
    (grad,) = torch.autograd.grad(out.terms["2.penalty"].sum(), leaves["2.s"])
    assert torch.allclose(grad, params["2.s"])
    (grad,) = torch.autograd.grad(out.f.sum(), leaves["2.s"])
    assert grad.abs().min() > 0


def test_nothing_is_left_in_the_network() -> None:
    built = model(Jittered)
    params, noise, x = tensors(built)
    for engine in (Engine("loop"), Engine("stack")):
        engine.apply(built, params, x, buffers=noise)
        layer = built.net.get_submodule("2")
        assert layer.eps is None
        assert layer.penalty is None


class Seen(doxa.method.Method):
    """Maximum of the log joint with the layer's penalty; compares a pass in training with a frozen
    one at the last state."""

    name = "test-seen"
    found: ClassVar[dict[str, Any]] = {}

    def prepare(self, problem: Any) -> Any:
        return problem.rewrite(lambda name, layer: Batched(6, 2) if name == "3" else None)

    def stages(self, run: Any) -> Any:
        yield doxa.method.optimise(doxa.method.log_joint, run.steps, over=("theta", "layers"))

    def finish(self, run: Any, state: Any, kept: Any) -> Any:
        batch, theta = run.all_rows(), state["theta"]
        self.found.update(
            state=state, batch=batch, run=run, frozen=run.evaluate(theta, state, batch),
            trained=run.train(theta, state, batch, None),
        )  # fmt: skip
        own = {**run.common(self), **run.shared(state)}
        return doxa.posterior.SamplePosterior(samples=theta.unsqueeze(1), **own)


def frozen_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_terms_come_from_a_pass_with_batch_norm_frozen(engine: str) -> None:
    """By hand from the running statistics of each member. In training they are those of the batch,
    and the pass changes them."""
    x = 3 + 2 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    doxa.fit(
        frozen_network(), (x, x[:, :2]), Seen(), likelihood=doxa.Gaussian(0.5), members=M, steps=5,
        batch_size=8, engine=engine, progress=False,
    )  # fmt: skip
    found = Seen.found
    run, state, frozen, trained = (found[k] for k in ("run", "state", "frozen", "trained"))
    params, own = run.layout.unflatten(state["theta"]), run.net.layers.unflatten(state["layers"])
    assert not frozen.changed and "buffer.1.running_mean" in trained.changed
    for m in range(M):
        h = x @ params["0.weight"][m].T + params["0.bias"][m]
        mean, variance = (state[f"buffer.1.running_{kind}"][m] for kind in ("mean", "var"))
        h = torch.tanh(
            (h - mean) / (variance + 1e-5).sqrt() * params["1.weight"][m] + params["1.bias"][m]
        )
        f = h @ params["3.weight"][m].T + params["3.bias"][m]
        value = torch.distributions.Normal(f, 0.5).log_prob(x[:, :2]).sum()
        assert torch.allclose(frozen.terms["3.seen"][m], h.mean(0), rtol=1e-10)
        assert torch.allclose(frozen.terms["3.penalty"][m], 0.5 * own["3.s"][m].square().sum())
        assert torch.allclose(frozen.f[m], f, rtol=1e-10)
        assert torch.allclose(frozen.value[m], value, rtol=1e-10)
        assert not torch.allclose(trained.terms["3.seen"][m], h.mean(0), rtol=1e-3)


class Reshaped(nn.Module):
    """[B, T, d] to [B·T, d] and back, with dropout between: T noise rows for each row of x."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.first(x).reshape(-1, 4))
        return self.last(h).reshape(len(x), -1).sum(1, keepdim=True)


@pytest.mark.parametrize("method", ["map", "mc-dropout"])
def test_noise_rows_follow_a_reshape(method: str) -> None:
    built = Model(Reshaped()).build(torch.zeros(1, 7, 3))
    assert built.sites == {"drop.uniform": Site("uniform", (4,), 7)}
    x = torch.randn(20, 7, 3, generator=torch.Generator().manual_seed(0))
    posterior = doxa.fit(Reshaped(), (x, x.sum((1, 2))), method, members=2, steps=5, batch_size=8)
    whole, parts = posterior.predict(x).mean, [posterior.predict(r).mean for r in x.split(6)]
    assert torch.allclose(whole, torch.cat(parts), rtol=1e-4, atol=1e-5)


class Odd(MethodLayer, nn.Module):
    def noise(self, x: Tensor) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {"eps": ("normal", (4, len(x)))}

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_noise_that_grows_along_another_axis_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 1), Odd())
    with pytest.raises(ModelError, match="first axis"):
        Model(net).build(torch.zeros(1, 2))
