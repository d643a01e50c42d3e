"""Mixtures and transforms are posteriors too: they predict, save and load; chains go to arviz."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa import store
from doxa.errors import MethodError, Unavailable
from doxa.posterior import MixturePosterior, PredictiveTransform, TransformedPosterior


@store.register("test.wider")
@dataclass(frozen=True)
class Wider(PredictiveTransform):
    """A Gaussian of the same mean and `factor` times the standard deviation."""

    factor: float

    def __call__(self, p: doxa.Predictive) -> doxa.Predictive:
        noise = torch.log(self.factor * p.std)
        f = torch.cat([p.mean, torch.expm1(noise.exp() - 1e-3).log()], 1)  # undo the softplus
        return doxa.Predictive(f.unsqueeze(0), "heteroscedastic")


def _data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=g, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.3 * torch.randn(40, 1, generator=g, dtype=torch.float64)


def _linear(degree: int) -> doxa.Posterior:
    posterior: doxa.Posterior = doxa.fit(
        None, _data(), doxa.BayesianLinear("polynomial", degree=degree)
    )
    return posterior


def test_a_transform_changes_predictions_and_survives_saving(tmp_path: Path) -> None:
    x, y = _data()
    net = doxa.nets.mlp(2, 1, hidden=(5,)).double()
    for base in (_linear(1), doxa.fit(net, (x, y), "deep-ensemble", steps=20, members=2)):
        posterior = TransformedPosterior(base, Wider(2.0))
        p, q = posterior.predict(x), base.predict(x)
        torch.testing.assert_close(p.mean, q.mean)
        torch.testing.assert_close(p.std, 2 * q.std)
        assert torch.equal(posterior.functions(x, 2, 1), base.functions(x, 2, 1))
        posterior.save(tmp_path / base.kind)
        again = doxa.load(tmp_path / base.kind)
        assert isinstance(again, TransformedPosterior)
        assert again.transform == Wider(2.0)
        assert torch.equal(again.predict(x).std, p.std)


def test_a_mixture_weighs_its_parts_and_survives_saving(tmp_path: Path) -> None:
    """log p(y) of the mixture is the log of the weighted mean of the parts' densities."""
    x, y = _data()
    parts = [_linear(1), _linear(2)]
    posterior = MixturePosterior(parts, [1.0, 3.0])
    each = torch.stack([part.predict(x).log_prob(y) for part in parts])
    expected = torch.logsumexp(each + torch.tensor([0.25, 0.75]).double().log()[:, None], 0)
    torch.testing.assert_close(posterior.predict(x).log_prob(y), expected)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    assert torch.equal(again.predict(x).log_prob(y), posterior.predict(x).log_prob(y))
    with pytest.raises(MethodError, match="nonnegative"):
        MixturePosterior(parts, [1.0, -1.0])


def _networks(method: str = "mean-field") -> MixturePosterior:
    """Two fits that are alike in everything, the seed too, and so draw alike from one seed."""
    torch.manual_seed(0)
    net = doxa.nets.mlp(2, 1, hidden=(3,)).double()
    parts = [doxa.fit(net, _data(), method, steps=3, progress=False) for _ in range(2)]
    return MixturePosterior(parts, [0.5, 0.5])


def test_the_parts_of_a_mixture_draw_for_themselves() -> None:
    """500 draws from each of two parts that are equal are 1,000 different ones."""
    posterior, x = _networks(), _data()[0][:1]
    drawn = {
        "functions": posterior.functions(x, 1000),
        "prior functions": posterior.prior_functions(x, 1000),
        "samples": posterior.predict(x, 1000).samples,
        "targets": posterior.predict(x, 1000).sample(1000),
    }
    for name, values in drawn.items():
        assert len(values) == 1000, name
        assert len(values.flatten().unique()) == 1000, name
    assert torch.equal(posterior.functions(x, 10), posterior.functions(x, 10))
    assert not torch.equal(posterior.functions(x, 10, 1), posterior.functions(x, 10, 2))


@pytest.mark.parametrize(
    ("weights", "n", "counts"),
    [
        ([0.5, 0.5], 50, [25, 25]),
        ([0.25, 0.75], 40, [10, 30]),
        ([0.001, 0.999], 50, [1, 49]),  # what is believed at all is asked
        ([0.0, 1.0], 50, [0, 50]),
        ([0.3, 0.7], 1, [0, 1]),
        ([0.2, 0.3, 0.5], 10, [2, 3, 5]),
    ],
)
def test_n_is_the_number_of_samples_in_all(weights: list[float], n: int, counts: list[int]) -> None:
    """Split by weight; each part counts by its weight, however many of them it drew."""
    part, x = _networks().parts[0], _data()[0]
    p = MixturePosterior([part] * len(weights), weights).predict(x, n)
    assert len(p.samples) == n
    wanted = [w / c for w, c in zip(weights, counts, strict=True) if c for _ in range(c)]
    if n > 1:
        assert sorted(p.weights.tolist()) == pytest.approx(sorted(wanted))
    assert float(p.weights.sum()) == pytest.approx(1.0)


def test_a_mixture_keeps_moments_where_asked() -> None:
    posterior, x = _networks(), _data()[0]
    few, many = (posterior.predict(x, 40, keep=keep) for keep in ("moments", "samples"))
    torch.testing.assert_close(few.mean, many.mean)
    torch.testing.assert_close(few.epistemic, many.epistemic)
    with pytest.raises(Unavailable, match="moments"):
        _ = few.samples


def test_a_mixture_is_reweighted_by_what_its_parts_predicted() -> None:
    """After new rows, p(M | D, D') ∝ p(M | D) p(D' | M, D): as fitting to all rows at once."""
    x, y = _data()
    method = {
        k: doxa.BayesianLinear("polynomial", degree=k, noise=0.3, prior_std=1.0) for k in (1, 2)
    }
    early = [doxa.fit(None, (x[:25], y[:25]), m) for m in method.values()]
    late = [doxa.fit(None, (x, y), m) for m in method.values()]
    prior = torch.softmax(torch.tensor([p.log_evidence for p in early]), 0)
    expected = torch.softmax(torch.tensor([p.log_evidence for p in late]), 0)
    posterior = MixturePosterior(early, prior).condition(x[25:], y[25:])
    torch.testing.assert_close(posterior.weights, expected.double(), rtol=1e-6, atol=1e-9)


def test_chains_go_to_arviz() -> None:
    pytest.importorskip("arviz_base")
    net = doxa.nets.mlp(2, 1, hidden=(3,)).double()
    posterior = doxa.fit(net, _data(), doxa.HMC(draws=6, burn_in=4, leapfrog=2), members=3)
    tree = posterior.to_arviz()
    assert tree.posterior["0.weight"].shape == (3, 6, 3, 2)
    want = posterior.draw()["0.weight"].reshape(3, 6, 3, 2).numpy()
    assert (tree.posterior["0.weight"].to_numpy() == want).all()
    with pytest.raises(Unavailable, match="chains"):
        _linear(1).to_arviz()
    pytest.importorskip("xarray_einstats")  # of the extra `diagnostics`, for arviz's own summary
    import arviz_stats

    table = arviz_stats.summary(tree)
    assert len(table) == posterior.samples.shape[2] and "r_hat" in table.columns


def test_fewer_draws_than_kept_are_thinned_evenly() -> None:
    """5 of 2 chains × 10 draws: places 0, 3, 6 of the first and 0, 5 of the second."""
    net = doxa.nets.mlp(2, 1, hidden=(3,)).double()
    posterior = doxa.fit(net, _data(), doxa.HMC(draws=10, burn_in=10, leapfrog=3), members=2)
    kept = torch.arange(posterior.samples.numel()).double().reshape(posterior.samples.shape)
    posterior.samples = kept  # all different, which rejected proposals are not
    want = torch.cat([kept[0, [0, 3, 6]], kept[1, [0, 5]]])
    assert torch.equal(posterior.layout.flatten(posterior.draw(5)), want)


def test_features_are_those_of_each_members_own_statistics() -> None:
    g = torch.Generator().manual_seed(0)
    x = 5.0 + 3.0 * torch.randn(64, 3, generator=g)
    y = x[:, 0].sin()
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    options = {"steps": 60, "progress": False, "validation": None}
    posterior = doxa.fit(net, (x, y), "deep-ensemble", members=2, **options)
    head = {k: v for k, v in posterior.draw().items() if k.startswith("3.")}  # [2, ...]
    by_hand = []
    for m in range(2):
        alone = doxa.fit(net, (x, y), "deep-ensemble", members=[m], **options)
        z = alone.features(x)
        by_hand.append(z)
        f = z @ head["3.weight"][m].T + head["3.bias"][m]
        torch.testing.assert_close(f[:, 0], alone.predict(x).mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(posterior.features(x), torch.stack(by_hand).mean(0))
