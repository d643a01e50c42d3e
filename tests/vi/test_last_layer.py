"""Last-layer VI where the network does something after its last layer: the bound against the linear
model that the network is in these weights, and the networks that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, StudentT, kl_divergence
from torch.func import functional_call, jacrev

import doxa
from doxa.errors import ModelError
from doxa.method import Clock, Run, State
from doxa.posterior import Posterior
from doxa.vi.last_layer import LastLayerVI, lost_to_softmax

NOISE, STD = 0.3, 0.8
ROWS = 25


class After(nn.Module):
    """A fixed hidden layer, the last layer, and something after it."""

    def __init__(self, outputs: int, after: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 3), nn.Linear(3, outputs)
        self.after = after
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("scale", torch.tensor([3.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, torch.tanh(self.first(x)), x)


def places(h: Tensor) -> Tensor:
    """Features at three places of each row, [B, 3, d]."""
    return h.unsqueeze(1) * torch.tensor([0.5, 1.0, 2.0], dtype=h.dtype)[:, None]


AFFINE: dict[str, tuple[int, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "itself": (1, lambda net, h, x: net.head(h)),
    "a factor": (1, lambda net, h, x: 10 * net.head(h)),
    "a shift of each row": (1, lambda net, h, x: x.sum(1, keepdim=True) - net.head(h)),
    "units of y": (2, lambda net, h, x: net.head(h) * net.scale + 7),
    "a permutation": (2, lambda net, h, x: net.head(h).flip(1)),
    "one of two": (2, lambda net, h, x: net.head(h)[:, :1]),
    "a mean over places": (2, lambda net, h, x: net.head(places(h)).mean(1)),
    "places": (2, lambda net, h, x: 2 * net.head(places(h))),
    "places as rows": (1, lambda net, h, x: net.head(places(h).flatten(0, 1)).reshape(-1, 3)),
}

OTHER: dict[str, tuple[int, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "an activation": (1, lambda net, h, x: nn.functional.softplus(net.head(h))),
    "a limit": (1, lambda net, h, x: net.head(h).clamp(-50, 50)),
    "a factor of x": (1, lambda net, h, x: x[:, :1] * net.head(h)),
    "a learned factor": (1, lambda net, h, x: net.factor * net.head(h)),
    "rows in common": (1, lambda net, h, x: (lambda u: u - u.mean(0, keepdim=True))(net.head(h))),
    "its bias again": (1, lambda net, h, x: net.head(h) + h[:, :1] * net.head.bias),
    "weights used before": (1, lambda net, h, x: net.head(h @ net.head.weight.T + h)),
}


class Watched(LastLayerVI):
    """Keeps what it was fitted with."""

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        posterior = super().finish(run, state, kept)
        vars(posterior).update(run=run, state=state)
        return posterior


def fitted(net: After, method: LastLayerVI, steps: int = 5, **options: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 2, generator=g, dtype=torch.float64)
    with torch.no_grad():
        f = net(x)
    y = 0.3 * f + torch.randn(f.shape, generator=g, dtype=torch.float64)
    options = {"likelihood": doxa.Gaussian(NOISE), "prior": doxa.Normal(STD)} | options
    posterior = doxa.fit(
        net, (x, y), method, init="given", validation=None, steps=steps, batch_size=ROWS,
        progress=False, **options,
    )  # fmt: skip
    return posterior, x, y


def network(case: tuple[int, Any]) -> After:
    torch.manual_seed(0)
    return After(*case).double()


def linear(net: After, x: Tensor) -> tuple[Tensor, Tensor]:
    """f = J w + c in the last layer's weights w, by autograd: J [N · outputs, w] and c."""
    names = ("head.weight", "head.bias")
    zero = {name: torch.zeros_like(net.get_parameter(name)) for name in names}
    at = lambda own: functional_call(net, own, (x,)).flatten()  # noqa: E731
    jacobians = jacrev(at)(zero)
    matrix = torch.cat([jacobians[name].flatten(1) for name in names], 1)
    return matrix.detach(), at(zero).detach()


@pytest.mark.parametrize("case", AFFINE)
def test_the_bound_is_that_of_the_linear_model(case: str) -> None:
    """E_q log p(y | w) and KL(q ‖ p) of the linear model by textbook formulas, at the q of a short
    fit: the reported bound has no noise, to 1e-9."""
    net = network(AFFINE[case])
    posterior, x, y = fitted(net, LastLayerVI(features="frozen", initial_std=0.2))
    matrix, shift = linear(net, x)
    size = matrix.shape[1]
    mean = posterior.subset.flatten(posterior.layout.unflatten(posterior.mean[0]))
    sigma = posterior.covariance.matmul(torch.eye(size).double().unsqueeze(1))[:, 0]
    fit = Normal(matrix @ mean + shift, NOISE).log_prob(y.flatten()).sum()
    lost = 0.5 * (matrix @ sigma @ matrix.T).trace() / NOISE**2
    prior = MultivariateNormal(torch.zeros(size).double(), STD**2 * torch.eye(size).double())
    wanted = fit - lost - kl_divergence(MultivariateNormal(mean, sigma), prior)
    assert posterior.elbo == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize("case", AFFINE)
def test_the_exact_posterior_is_the_optimum(case: str) -> None:
    """At the posterior of the linear model the bound is the log evidence, and the gradient of what
    is ascended is zero by the mean and by the covariance: widths are the exact ones."""
    net = network(AFFINE[case])
    method = Watched(features="frozen", average=0.0)
    posterior, x, y = fitted(net, method, steps=1)
    run, matrix, shift = posterior.run, *linear(net, x)
    eye, away = torch.eye(matrix.shape[1]).double(), y.flatten() - shift
    sigma = torch.linalg.inv(matrix.T @ matrix / NOISE**2 + eye / STD**2)
    marginal = STD**2 * matrix @ matrix.T + NOISE**2 * torch.eye(len(away)).double()
    evidence = MultivariateNormal(torch.zeros_like(away), marginal).log_prob(away)
    factor = torch.linalg.cholesky(sigma)
    std = factor.diagonal()
    own = sigma @ matrix.T @ away / NOISE**2
    q = {
        "mean": run.initial.clone().index_copy(1, run.subset_index, own.unsqueeze(0)),
        "rho": std.expm1().log().unsqueeze(0),
        "lower": (factor / std.unsqueeze(1)).tril(-1).unsqueeze(0),
    }
    assert method._final_elbo(run, q, posterior.state) == pytest.approx(float(evidence), rel=1e-8)
    clock = Clock(torch.tensor(0), torch.tensor(0.0), 1, run.noise("test"))
    state = {**posterior.state, **q}
    _, grads, _ = run.value_and_grad(method.objective(run), state, run.all_rows(), clock, tuple(q))
    assert max(float(grad.abs().max()) for grad in grads.values()) < 1e-6 * float(away.norm() ** 2)


@pytest.mark.slow
def test_a_fit_behind_a_factor_reaches_the_evidence() -> None:
    """10 · head: the bound within 0.01 nats, and standard deviations within 1 %."""
    net = network(AFFINE["a factor"])
    with torch.no_grad():
        net.first.weight.mul_(3)
    method = LastLayerVI(features="frozen", average=0.0)
    posterior, x, y = fitted(net, method, 8000, lr=0.02)
    matrix, _ = linear(net, x)
    marginal = STD**2 * matrix @ matrix.T + NOISE**2 * torch.eye(ROWS).double()
    evidence = MultivariateNormal(torch.zeros(ROWS).double(), marginal).log_prob(y[:, 0])
    assert abs(posterior.elbo - float(evidence)) < 0.01
    sigma = torch.linalg.inv(matrix.T @ matrix / NOISE**2 + torch.eye(4).double() / STD**2)
    got = posterior.covariance.diagonal()[0].sqrt()
    assert (got / sigma.diagonal().sqrt() - 1).abs().max() < 0.01


@pytest.mark.parametrize("case", OTHER)
def test_what_is_not_affine_is_refused(case: str) -> None:
    with pytest.raises(ModelError, match=r"no affine function.*low-rank-vi"):
        fitted(network(OTHER[case]), LastLayerVI(), 1)


def test_a_learned_factor_is_fixed_where_features_are() -> None:
    net = network(OTHER["a learned factor"])
    posterior, _, _ = fitted(net, LastLayerVI(features="frozen"), 1)
    other, _, _ = fitted(
        network((1, lambda net, h, x: 2 * net.head(h))), LastLayerVI(features="frozen"), 1
    )
    assert posterior.elbo == pytest.approx(other.elbo, rel=1e-12)


def test_a_last_layer_that_is_called_twice_is_refused() -> None:
    twice = (1, lambda net, h, x: net.head(h) + net.head(2 * h))
    with pytest.raises(ModelError, match="'head', is called more than once"):
        fitted(network(twice), LastLayerVI(), 1)


def test_the_softmax_bound_is_of_the_logits() -> None:
    """Behind a factor of 3 the first loss, −(bound + log prior of all weights + entropy)/n, is that
    of logits with three times the mean and nine times the variance; a softmax that follows itself
    is refused, and "sampled" takes it."""
    net = network((3, lambda net, h, x: 3 * net.head(h)))
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 2, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (ROWS,), generator=g)
    options: dict[str, Any] = {
        "likelihood": "categorical", "prior": doxa.Normal(STD), "init": "given", "steps": 1,
        "validation": None, "batch_size": ROWS, "progress": False,
    }  # fmt: skip
    method = LastLayerVI(softmax="bound", initial_std=0.4)
    posterior = doxa.fit(net, (x, y), method, **options)
    with torch.no_grad():
        phi = torch.cat([torch.tanh(net.first(x)), torch.ones(ROWS, 1).double()], 1)
        f = net(x).unsqueeze(0)
        variance = 9 * 0.4**2 * phi.square().sum(1).reshape(1, -1, 1).expand(f.shape)
        fit = f[0].log_softmax(1)[torch.arange(ROWS), y].sum() - lost_to_softmax(f, variance).sum()
        every = torch.cat([p.flatten() for p in net.parameters()])
        prior = Normal(0.0, STD).log_prob(every).sum() - 0.5 * 12 * 0.4**2 / STD**2
        entropy = 12 * Normal(0.0, 0.4).entropy()
    loss = posterior.history["loss"][0][1][0]
    assert loss == pytest.approx(-float(fit + prior + entropy) / ROWS, rel=1e-6)
    net.after = lambda net, h, x: net.head(h).softmax(1)
    with pytest.raises(ModelError, match="softmax='sampled'"):
        doxa.fit(net, (x, y), method, **options)
    doxa.fit(net, (x, y), LastLayerVI(), **options)


def test_other_priors_are_averaged_over_draws() -> None:
    """The expected log prior of a Student-t has no closed form. The mean of 2,000 values of the
    objective is the bound with the prior's expectation by quadrature, to 4 standard errors."""
    net = network((1, lambda net, h, x: net.head(h)))
    method = Watched(features="frozen", initial_std=0.9)
    prior = doxa.StudentTPrior(3.0, 0.5)
    posterior, x, y = fitted(net, method, 1, lr=1e-12, prior=prior)
    run, state = posterior.run, posterior.state
    objective, rows, noise = method.objective(run), run.all_rows(), run.noise("test")
    with torch.no_grad():
        values = torch.stack([
            objective(run, state, rows, Clock(torch.tensor(t), torch.tensor(0.0), 1, noise))[0]
            for t in range(2000)
        ])  # fmt: skip
        matrix, shift = linear(net, x)
        head = torch.cat([net.head.weight.flatten(), net.head.bias])
        fit = Normal(matrix @ head + shift, NOISE).log_prob(y.flatten()).sum()
        fit = fit - 0.5 * 0.9**2 * matrix.square().sum() / NOISE**2
        z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
        t = StudentT(torch.tensor(3.0).double(), 0.0, 0.5)
        inside = (
            t.log_prob(head + 0.9 * z.unsqueeze(1)) * Normal(0.0, 1.0).log_prob(z).exp()[:, None]
        )
        entropy = 4 * Normal(0.0, 0.9).entropy()
        wanted = fit + torch.trapezoid(inside.sum(1), z) + entropy  # frozen weights have no prior
    error = values.std() / 2000**0.5
    assert abs(float(values.mean() - wanted)) < 4 * float(error)
