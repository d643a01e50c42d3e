"""The Bayesian bootstrap of a mean, whose posterior is known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import doxa
from doxa.optim import SGD


class Constant(nn.Module):
    """f(x) = b."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.b.expand(len(x), 1)


def test_it_is_the_conjugate_answer_on_a_mean() -> None:
    """Under a flat prior the mean of the population has posterior mean ȳ and variance
    s²/(n + 1), s² = Σ(y − ȳ)²/n (Rubin 1981). 1,000 members; tolerances of four standard errors of
    a mean and of a variance (the fourth moment is below 3.2 here). One gradient step of rate 1 on
    a parabola of curvature 1 is its minimum."""
    members, n = 1000, 30
    g = torch.Generator().manual_seed(1)
    y = torch.rand(n, 1, generator=g, dtype=torch.float64) ** 2
    posterior = doxa.fit(
        Constant(), (torch.zeros(n, 1, dtype=torch.float64), y), "bootstrap", members=members,
        steps=1, lr=1.0, optimizer=SGD(0.0), batch_size=n, schedule="constant", validation=None,
        likelihood=doxa.Gaussian(noise=1.0), prior=doxa.Normal(1e6), init="given",
    )  # fmt: skip
    means = posterior.samples[:, 0, 0]
    variance = float(y.var(correction=0)) / (n + 1)
    assert abs(float(means.mean()) - float(y.mean())) < 4 * (variance / members) ** 0.5
    assert abs(float(means.var()) / variance - 1) < 4 * (2.2 / members) ** 0.5


def test_members_have_weights_of_their_own() -> None:
    """Of mean 1 over the rows they train on, whichever are held out; the same for the same seed."""
    from doxa.ensemble.bootstrap import BayesianBootstrap

    seen: list[Tensor] = []

    class Watched(BayesianBootstrap):
        def row_weights(self, run: object) -> Tensor:
            weights = super().row_weights(run)  # type: ignore[arg-type]
            for m, split in enumerate(run.split_of):  # type: ignore[attr-defined]
                own = run.rows.rows[split]  # type: ignore[attr-defined]
                assert abs(float(weights[m, own].mean()) - 1) < 1e-12
                out = torch.ones(len(weights[m]), dtype=torch.bool)
                out[own] = False
                assert out.sum() == 20 and (weights[m, out] == 1).all()
            seen.append(weights)
            return weights

    x = torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for seed in (0, 0, 1):
        net = doxa.nets.mlp(2, 1, (3,)).double()
        doxa.fit(net, (x, x[:, 0]), Watched(), members=3, steps=1, seed=seed)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0][0], seen[0][1])
