"""Which rows are chosen, and scores of pools that come in blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import doxa
from doxa import decide
from doxa.errors import MethodError, Unavailable


def test_ties_are_decided_by_the_seed_and_by_nothing_else() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    chosen = [tuple(decide.select(scores, 2, seed=seed).tolist()) for seed in range(40)]
    assert chosen == [tuple(decide.select(scores, 2, seed=seed).tolist()) for seed in range(40)]
    assert {row for pair in chosen for row in pair} == {0, 2, 3, 5}


def test_power_draws_rows_in_proportion_to_their_scores() -> None:
    """The first of two rows with scores 3 and 1 comes first in 3/4 of 500 draws, within four
    standard errors."""
    first = [int(decide.select(torch.tensor([3.0, 1.0]), 1, diversity="power", seed=s)) == 0
             for s in range(500)]  # fmt: skip
    assert abs(sum(first) / 500 - 0.75) < 4 * (0.75 * 0.25 / 500) ** 0.5


def test_power_refuses_negative_scores() -> None:
    """Entropies of densities below one are negative, and no probability is in proportion to them:
    −1 would be drawn as often as −9. A softmax knows which is larger: e⁸ to one."""
    scores = torch.tensor([-9.0, -1.0])
    with pytest.raises(MethodError, match="the score of row 0 is -9: use 'softmax' or 'softrank'"):
        decide.select(scores, 1, diversity="power")
    for seed in range(40):
        assert int(decide.select(scores, 1, diversity="softmax", seed=seed)) == 1
    rounded = torch.tensor([-1e-9, 1.0])  # no information, up to rounding
    assert int(decide.select(rounded, 1, diversity="power")) == 1
    taken = decide.select(torch.tensor([-9.0, 1.0]), 1, diversity="power", taken=[0])
    assert taken.tolist() == [1]  # what is taken has no say


def test_ranks_are_drawn_in_proportion_to_a_power_of_themselves() -> None:
    """Of three rows the r-th comes first with probability r^(−2)/(1 + 1/4 + 1/9), whatever the
    scores are; 500 draws, four standard errors."""
    scores = torch.tensor([0.1, 7.0, 3.0])
    first = [int(decide.select(scores, 1, diversity="softrank", beta=2.0, seed=s))
             for s in range(500)]  # fmt: skip
    whole = 1 + 1 / 4 + 1 / 9
    for row, rank in ((1, 1), (2, 2), (0, 3)):
        share = rank**-2 / whole
        assert abs(first.count(row) / 500 - share) < 4 * (share * (1 - share) / 500) ** 0.5


def test_a_coreset_takes_one_of_each_cluster() -> None:
    """The best scores all lie in one of three clusters."""
    features = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [9.0]])
    scores = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    chosen = decide.select(scores, 3, diversity="coreset", features=features)
    assert chosen[0] == 0
    assert {int(features[row, 0]) for row in chosen} == {0, 5, 9}


def test_a_pool_in_blocks_has_the_scores_of_the_whole() -> None:
    """One mask a function, at every row of the pool, whatever the pool is made of."""
    torch.manual_seed(0)
    x = torch.randn(70, 3)
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    posterior = doxa.fit(net, (x, y), "mc-dropout", likelihood="categorical", steps=5)
    whole = decide.bald(posterior.predict(x, 20))
    pools = [x, x.numpy(), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=16)]
    for pool in pools:
        found = decide.score(posterior, pool, n=20, block=16)
        assert torch.allclose(found, whole, atol=1e-6)
    assert len(decide.score(posterior, x, by="random", seed=1).unique()) == 70


def test_functions_are_drawn_of_a_closed_form() -> None:
    """A linear model: what one label teaches is ½ log(total/σ²); from 4,000 draws of the functions
    a variance is known to 2.2 %, and its logarithm's half to 0.011, of which five are allowed."""
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    posterior = doxa.fit(None, (x, 2 * x + 0.1 * torch.sin(40 * x)), "linear")
    with pytest.raises(Unavailable, match="closed form"):
        decide.batch_bald(posterior.predict(x), 1)
    found = decide.batch_bald(decide.joint(posterior, x, 4000), 1)
    exact = decide.bald(posterior.predict(x))
    assert abs(float(found.scores[0]) - float(exact.max())) < 0.055
    assert float(exact[found.rows[0]]) > float(exact.max()) - 0.11


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_chooses_what_the_cpu_chooses() -> None:
    source = torch.Generator().manual_seed(0)
    probs = (1.5 * torch.randn(6, 40, 3, generator=source, dtype=torch.float64)).softmax(2)
    here, there = (doxa.Predictive.from_probs(probs.to(d)) for d in ("cpu", "cuda"))
    for by in ("bald", "max_entropy", "mean_std", "batch_bald"):
        assert torch.equal(decide.select(here, 5, by), decide.select(there, 5, by)), by
    assert torch.allclose(decide.epig(here, here), decide.epig(there, there).cpu(), atol=1e-12)
