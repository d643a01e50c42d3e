"""Weights of rows: a row of weight 0 is no row, n is Σw, and rows are counted by (Σw)²/Σw²."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import doxa
from doxa.data import rows as weights
from doxa.driver import setup
from doxa.driver.setup import own_parts, share
from doxa.errors import DataError, MemoryBudgetError

N = 400
Data = tuple[Tensor, Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def line(noise: float = 0.3) -> Data:
    x = torch.randn(N, 1, generator=generator(1))
    return x, x[:, 0] + noise * torch.randn(N, generator=generator(2))


def uneven(n: int = N) -> Tensor:
    return torch.rand(n, generator=generator(3)).square() + 0.01


def right(data: Any, method: Any = "map", **options: Any) -> Any:
    """A network y = x that stays as it is given, so that its errors at all rows are y − x."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    options = {"steps": 2, "progress": False, "lr": 1e-9, "init": "given"} | options
    return doxa.fit(net, data, method, likelihood="gaussian", **options)


def learned_noise(posterior: Any) -> float:
    return float(posterior.predict(torch.zeros(1, 1)).aleatoric.mean().sqrt())


def same(a: Any, b: Any) -> bool:
    p, q = (one.predict(torch.linspace(-2, 2, 9)[:, None]) for one in (a, b))
    return torch.equal(p.mean, q.mean) and torch.equal(p.variance, q.variance)


def test_the_effective_number_of_rows() -> None:
    """By its definition, whatever the weights are multiplied by; that of equal weights is exact."""
    w = uneven().double()
    expected = float(w.sum() ** 2 / (w**2).sum())
    for factor in (1.0, 0.05, 1e200, 1e-200):
        assert weights.effective_rows(factor * w) == pytest.approx(expected, rel=1e-12)
        assert weights.effective_rows(torch.full((7,), factor, dtype=torch.float64)) == 7.0
    found = weights.per_effective_row(3 * w)
    assert found is not None and float(found.sum()) == pytest.approx(expected, rel=1e-12)


def test_means_and_standard_errors() -> None:
    """By numpy; the standard error is the deviation over √m."""
    w, v = uneven().double(), torch.randn(N, generator=generator(5)).double()
    mean = np.average(v, weights=w)
    deviation = np.sqrt(np.average((v - mean) ** 2, weights=w))
    m = float(w.sum() ** 2 / (w**2).sum())
    assert float(weights.weighted_mean(v, w)) == pytest.approx(mean)
    assert weights.standard_error(v, w) == pytest.approx(deviation / m**0.5)
    assert weights.standard_error(v, w, 1) == pytest.approx(deviation / (m - 1) ** 0.5)
    ones = torch.ones(N)
    assert weights.standard_error(v, ones) == weights.standard_error(v, None)


@pytest.mark.parametrize("factor", [1.0, 0.05])
def test_noise_from_held_out_rows_is_that_of_weighted_errors(factor: float) -> None:
    """σ² = Σ w e²/Σ w · m/(m − 2), of m effective rows, under the prior N(0, 1) of log σ: by scipy;
    whatever all weights are multiplied by."""
    x, y = line()
    w = factor * uneven()
    posterior = right((x, y), sample_weight=w, validation=0.2)
    held = share([torch.arange(N)], 0.2, [0]).held_out
    assert held is not None
    e, own = (y - x[:, 0])[held[0]].double().numpy(), w[held[0]].double().numpy()
    m = own.sum() ** 2 / (own**2).sum()
    squares = (own * e**2).sum() / own.sum()
    closed = (squares * m / (m - 2)) ** 0.5

    def loss(u: float) -> float:
        fit = -u - 0.5 * squares * np.exp(-2 * u)
        return -(m * fit + 2 * u + stats.norm.logpdf(u))

    expected = float(np.exp(optimize.minimize_scalar(loss, bounds=(-4, 2)).x))
    assert expected == pytest.approx(closed, rel=0.03)  # the prior is worth about a row
    assert learned_noise(posterior) == pytest.approx(expected, rel=6e-3)  # a hundred steps of Adam


def test_a_small_weight_for_all_rows_does_not_widen_the_noise() -> None:
    x, y = line()
    for method in ("map", "deep-ensemble", "bootstrap", "swa"):
        posterior = right((x, y), method, sample_weight=torch.full((N,), 0.05))
        assert learned_noise(posterior) == pytest.approx(0.3, abs=0.04), method


class Broken(Dataset[Any]):
    """Rows of which some hold NaN."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def broken(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of weight 0 among others: x is NaN there, and y 1000 or infinite."""
    kept = torch.arange(len(y)) % 4 != 1
    x = torch.where(kept[:, None], x, torch.nan)
    far = torch.where(torch.arange(len(y)) % 8 == 1, torch.inf, 1000.0)
    return x, torch.where(kept, y, far), kept * uneven(len(y)), kept


def test_rows_of_weight_zero_may_hold_anything() -> None:
    """However rows are passed; the fit is that without them to the bit."""
    x, y, w, kept = broken(*line())
    expected = right((x[kept], y[kept]), sample_weight=w[kept], standardize=True)
    frames: Any = pytest.importorskip("pandas")
    table = frames.DataFrame({"a": x[:, 0].numpy()})
    ways: list[Any] = [(x, y), (x.numpy(), y.numpy()), (table, y.numpy()), Broken(x, y)]
    ways.append(DataLoader(Broken(x, y), batch_size=128))
    for data in ways:
        posterior = right(data, sample_weight=w, standardize=True)
        assert same(posterior, expected)
        assert posterior.validation == expected.validation
        assert posterior.diagnostics["held_out"] == expected.diagnostics["held_out"]


def test_rows_of_weight_zero_of_a_stream_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, w, kept = broken(*line())
    monkeypatch.setattr("doxa.data.rows.free_memory", lambda *_: 0)  # nothing is read beforehand
    expected = right(TensorDataset(x[kept], y[kept]), sample_weight=w[kept], validation=0.2)
    assert same(right(Broken(x, y), sample_weight=w, validation=0.2), expected)


def test_a_copy_that_memory_does_not_allow_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, w, _ = broken(*line())
    monkeypatch.setattr("doxa.data.rows.free_memory", lambda *_: 1000)
    with pytest.raises(MemoryBudgetError, match="GiB"):
        right((x, y), sample_weight=w)


def test_a_fault_in_a_row_that_counts_is_named_by_its_own_number() -> None:
    x, y, w, kept = broken(*line())
    x[6] = torch.nan
    for data in ((x, y), Broken(x, y)):
        with pytest.raises(DataError, match="row 6"):
            right(data, sample_weight=w)
    with pytest.raises(DataError, match="row 6 "):
        frame = pytest.importorskip("pandas").DataFrame({"a": x[:, 0].numpy()})
        right((frame.set_axis(range(1000, 1000 + N)), y.numpy()), sample_weight=w)
    assert kept[6] and not kept[5]


def test_runs_number_rows_as_they_were_passed() -> None:
    x, y, w, kept = broken(*line())
    rows = [torch.arange(0, 300), torch.arange(100, N).flip(0), torch.arange(N) >= 150]
    numbers = kept.cumsum(0) - 1
    given = [own.nonzero()[:, 0] if own.dtype == torch.bool else own for own in rows]
    alone = [numbers[own[kept[own]]] for own in given]
    sweep = right((x, y), sample_weight=w, runs=doxa.Runs(rows=rows))
    expected = right((x[kept], y[kept]), sample_weight=w[kept], runs=doxa.Runs(rows=alone))
    assert all(same(a, b) for a, b in zip(sweep, expected, strict=True))
    assert torch.equal(sweep.specs[0].rows, rows[0])
    with pytest.raises(DataError, match="0 … 399"):
        right((x, y), sample_weight=w, runs=doxa.Runs(rows=[[N]]))


def test_one_class_is_seen_among_rows_that_count() -> None:
    x, _ = line()
    y = (x[:, 0] > 0).long()
    net = doxa.nets.mlp(1, 2, (4,))
    with pytest.raises(DataError, match="one class"):
        doxa.fit(net, (x, y), "map", sample_weight=y.float(), steps=2, progress=False)


def test_rows_are_held_out_where_their_effective_number_allows_it() -> None:
    """A hundred rows are cut into five parts of twenty; where 80 of them count next to nothing,
    there are twenty, and a part has four."""
    rows = [torch.arange(100)]
    few = torch.where(torch.arange(100) < 20, 1.0, 1e-6)
    assert own_parts(rows, [0], [0], few) is None
    assert own_parts(rows, [0], [0], torch.full((100,), 0.01)) is not None
    m = 100 / (1 + torch.linspace(-1, 1, 100).square().mean())  # of weights 1 + t, t symmetric
    tilted = 1 + torch.linspace(-1, 1, 100)
    assert weights.effective_rows(tilted) == pytest.approx(float(m), rel=1e-6)
    enough = own_parts(rows, [0], [0], tilted) is not None
    assert enough == (int(m) // setup.parts(int(m)) >= setup.FEWEST_HELD_OUT)


def test_validation_is_the_weighted_mean() -> None:
    """Less 1/m for the noise, which m effective rows have chosen."""
    x, y = line()
    w = uneven()
    posterior = right((x, y), sample_weight=w, validation=0.25)
    held = share([torch.arange(N)], 0.25, [0]).held_out
    assert held is not None
    scores = posterior.predict(x[held[0]]).log_prob(y[held[0]]).double().numpy()
    own = w[held[0]].double().numpy()
    expected = np.average(scores, weights=own) - (own**2).sum() / own.sum() ** 2
    assert posterior.validation == pytest.approx(expected, rel=1e-5)
    assert abs(np.average(scores, weights=own) - scores.mean()) > 1e-3


def test_a_status_counts_effective_rows() -> None:
    """Of intervals that are too narrow at the few rows that count, and hold all others."""
    x, y = line(0.05)
    w = torch.full((N,), 1e-4)
    w[::8] = 1.0
    y = torch.where(w == 1.0, x[:, 0] + 3.0 * (y - x[:, 0]).sign(), y)
    options: Any = {"validation": 0.5, "likelihood": doxa.Gaussian(0.1)}
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    fixed: Any = {"steps": 2, "progress": False, "lr": 1e-9, "init": "given"}
    posterior = doxa.fit(net, (x, y), "map", sample_weight=w, **options, **fixed)
    assert posterior.diagnostics["held_out"]["coverage"] < 0.05
    assert posterior.status in ("overconfident", "worse-than-constant")


def test_the_constant_to_beat_has_the_weights() -> None:
    """That of whole weights is that of repeated rows."""
    g = generator(7)
    times = torch.randint(1, 4, (30,), generator=g)
    y = torch.randn(30, 2, generator=g)
    again = y.repeat_interleave(times, 0)
    found = doxa.Gaussian().constant(y, y, times.double())
    torch.testing.assert_close(found, doxa.Gaussian().constant(again, y))
    for likelihood, classes in ((doxa.Bernoulli(), y.gt(0).float()), (doxa.Categorical(), None)):
        labels = torch.randint(0, 3, (30,), generator=g) if classes is None else classes
        again = labels.repeat_interleave(times, 0)
        found = likelihood.constant(labels, labels, times.double())
        torch.testing.assert_close(found, likelihood.constant(again, labels))


def test_a_bootstrap_keeps_the_given_weights_on_held_out_rows() -> None:
    """σ² of members that all are y = x: each by its own held-out rows and their weights."""
    x, y = line()
    w = 0.1 + (y - x[:, 0]).square()
    posterior = right((x, y), "bootstrap", sample_weight=w, validation=0.5, members=3)
    alone = right((x, y), "map", sample_weight=w, validation=0.5)
    assert learned_noise(posterior) == pytest.approx(learned_noise(alone), rel=1e-3)
    plain = right((x, y), "map", validation=0.5)
    assert abs(learned_noise(plain) - learned_noise(alone)) > 0.05


def test_the_shape_of_noise_does_not_depend_on_the_scale_of_weights() -> None:
    """Every fifth error is eight times as large: Student-t noise, by the same rows to the bit."""
    x, e = torch.randn(N, 1, generator=generator(1)), torch.randn(N, generator=generator(2))
    e[::5] *= 8.0
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    fixed: Any = {"steps": 2, "progress": False, "lr": 1e-9, "init": "given"}
    found = [
        doxa.fit(net, (x, x[:, 0] + 0.2 * e), "map", sample_weight=weight, **fixed)
        for weight in (None, torch.ones(N), torch.full((N,), 0.0625))
    ]
    assert all(isinstance(one.base_likelihood, doxa.StudentT) for one in found)
    scales = [float(one.draw()["likelihood.log_scale"]) for one in found]
    assert scales == pytest.approx([scales[0]] * 3, abs=1e-4)


def test_spread_between_members_is_averaged_by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members f = ±x have the variance 2x² at x: the noise is less by the mean of half of it,
    over rows by their weights."""
    x = torch.randn(N, 1, generator=generator(1))
    y = 5.0 * torch.randn(N, generator=generator(2))
    w = torch.where(x[:, 0].abs() < 1, 1.0, 0.01)
    net = torch.nn.Linear(1, 1, bias=False)
    starts = doxa.fit(net, (x, y), "map", members=2, steps=1, lr=1e-9, validation=None)
    index = starts.layout.index(["weight"])
    starts.samples[:, :, index] = torch.tensor([1.0, -1.0])[:, None, None]
    options: Any = {"members": 2, "steps": 1, "lr": 1e-9, "validation": 0.5, "init": starts}
    posterior = doxa.fit(net, (x, y), "map", likelihood="gaussian", sample_weight=w, **options)
    monkeypatch.setattr("doxa.ensemble.map.without_spread", lambda run, state, theta: theta)
    before = doxa.fit(net, (x, y), "map", likelihood="gaussian", sample_weight=w, **options)
    held = share([torch.arange(N)], 0.5, [0]).held_out
    assert held is not None
    spread = np.average(2 * x[held[0], 0].numpy() ** 2, weights=w[held[0]].numpy())
    noise = lambda one: one.draw()["likelihood.log_noise"].double().exp().square()  # noqa: E731
    lost = float((noise(before) - noise(posterior)).mean())
    assert lost == pytest.approx(0.5 * spread, rel=1e-3)


def test_weights_of_ones_change_no_bit() -> None:
    x, y = line()
    for method in ("map", "deep-ensemble", "mean-field"):
        net = doxa.nets.mlp(1, 1, (4,))
        options: Any = {"steps": 30, "progress": False, "members": 2, "likelihood": "gaussian"}
        found = doxa.fit(net, (x, y), method, sample_weight=torch.ones(N), **options)
        plain = doxa.fit(net, (x, y), method, **options)
        assert same(found, plain) and found.validation == plain.validation
        assert found.diagnostics["held_out"] == plain.diagnostics["held_out"]


def test_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    """The rows that count are what tells one fit from another."""
    x, y, w, kept = broken(*line())
    options: Any = {"checkpoint": tmp_path}

    def at_once(step: int, info: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        right((x, y), sample_weight=w, callbacks=[at_once], checkpoint_every=0.0, **options)
    again = right((x[kept], y[kept]), sample_weight=w[kept], **options)
    assert same(again, right((x, y), sample_weight=w))


def test_what_held_out_classes_say_is_weighted() -> None:
    """Logits twice as large gain log p_y − log Σp² at a row; one row more, one of m by its weight,
    is wrong."""
    x = 2.0 * torch.randn(N, 1, generator=generator(3))
    y = (torch.rand(N, generator=generator(4)) < x[:, 0].sigmoid()).long()
    w = uneven()
    net = torch.nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.0], [0.5]]))
    options: Any = {"likelihood": doxa.Categorical(temperature=1.0), "validation": 0.25}
    options |= {"steps": 2, "progress": False, "lr": 1e-9, "init": "given", "sample_weight": w}
    posterior = doxa.fit(net, (x, y), "map", **options)
    (held,) = share([torch.arange(N)], 0.25, [0]).held_out or ()
    p = posterior.predict(x[held]).probs.double()
    own, squares = w[held].double().numpy(), p.square().sum(1).log()
    each = (p.gather(1, y[held][:, None])[:, 0].log() - squares).numpy()
    wrong = np.average(((1 - p.amax(1)).log() - squares).numpy(), weights=own)
    right_less = np.average((p.amax(1) - (p.argmax(1) == y[held]).double()).numpy(), weights=own)
    m = own.sum() ** 2 / (own**2).sum()
    expected = np.average([*each, wrong], weights=[*own, own.sum() / m])
    found = posterior.diagnostics["held_out"]
    assert found["twice_as_sure"] == pytest.approx(expected, rel=1e-5)
    assert found["too_sure"] == pytest.approx(right_less, rel=1e-5)


def test_the_range_of_inputs_is_that_of_rows_that_count() -> None:
    """Adversarial training moves rows by a share of it."""
    x, y = line()
    kept = torch.arange(N) % 5 != 2
    far = torch.where(kept[:, None], x, 1e6)
    method = doxa.DeepEnsemble(adversarial=0.1)
    options: Any = {"steps": 20, "lr": 0.01, "members": 2, "init": "fresh"}
    got = right((far, y), method, sample_weight=kept.float(), **options)
    want = right((x[kept], y[kept]), method, sample_weight=torch.ones(int(kept.sum())), **options)
    assert same(got, want)
