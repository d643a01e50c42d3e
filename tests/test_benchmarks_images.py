"""The image tables: their data, their networks, and small runs of their cells from end to end."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import doxa
from benchmarks import image_methods, scenes
from benchmarks.image_cells import CHAINS, SCORES, cifar_cell, ood_cell, ood_quality, packed
from benchmarks.image_data import Images, load_images, patches, settings
from benchmarks.image_methods import PROTOCOLS, closeness_to, sample_last_layer
from benchmarks.image_tables import (
    CIFAR,
    MNIST,
    OOD,
    chains_table,
    mean_over_shifts,
    rotation_figure,
)
from benchmarks.images import TABLES
from benchmarks.scenes import CAMVID, PALETTE, coloured, load_scenes, unet
from doxa.app.bench import Store, compute
from doxa.app.bench.cells import plain
from doxa.errors import DataError, MethodError

DATA = os.environ.get("DOXA_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="DOXA_DATA names no folder of data sets")


def digits(rows: int = 240) -> Images:
    """Scikit-learn's digits, enlarged to MNIST's size; noise as the out-of-distribution set."""
    from sklearn.datasets import load_digits

    stored = load_digits()
    x = torch.tensor(stored.images[: rows + 100], dtype=torch.float32).unsqueeze(1) / 16
    x = torch.nn.functional.interpolate(x, size=28, mode="nearest")
    y = torch.tensor(stored.target[: rows + 100])
    noise = torch.rand(100, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    return Images("digits", x[:rows], y[:rows], x[rows:], y[rows:], {"noise": noise})


QUICK = replace(settings("ood", "small"), epochs=8, rate=5e-3, samples=6, burn_in=30)
# 8 epochs are 30 steps: q at T = 1 still guesses then, and a trajectory still moves
EPOCHS = {
    "mean-field": 48, "last-layer-vi": 48, "mnf": 48, "rank1": 12, "swag": 32,
    "multiswag": 32,
}  # fmt: skip


@cache
def fitted(method: str) -> tuple[Images, Any]:
    data = digits()
    return data, PROTOCOLS[method].fit(data, replace(QUICK, epochs=EPOCHS.get(method, 8)), 0)


@pytest.mark.slow
# not ivon, whose q has a width of 1/√n, nor chains on all weights, which are long
@pytest.mark.parametrize("method", [m for m in PROTOCOLS if m not in ("ivon", "hmc-all")])
def test_every_method_learns_and_is_scored(method: str) -> None:
    protocol, (data, posterior) = PROTOCOLS[method], fitted(method)
    n = QUICK.samples if protocol.draws else None
    p = posterior.predict(data.x_test, n)
    accuracy = float((p.probs.argmax(1) == data.y_test).double().mean())
    least = 0.2 if method == "laplace-last-diagonal" else 0.4  # the least sure of a short fit
    assert accuracy > least  # a guess is right one time in ten
    found = ood_quality(posterior, data, n)["noise"]
    closed = method in ("laplace-probit", "laplace-bridge")
    gone = {"mutual_information": method == "map" or closed, "energy": closed}
    assert list(found) == [name for name in SCORES if not gone.get(name)]
    assert found["mahalanobis"]["auroc"] > 0.6
    assert all(0 <= value <= 1 for score in found.values() for value in score.values())


@pytest.mark.slow
def test_chains_on_features_are_chains_on_the_last_layer() -> None:
    """The same function as the whole network with the drawn last layer put in. With many rows for
    few weights the posterior is nearly Gaussian about its maximum (Bernstein and von Mises):
    Laplace there is the nearest, and a diagonal one, or one at other weights, is farther."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=g)
    y = (x[:, :3] + 0.7 * torch.randn(400, 3, generator=g)).argmax(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    model = doxa.Model(net, "categorical", doxa.Normal(1.0))
    trunk = doxa.fit(model, (x, y), "map", steps=600, validation=None)
    posterior = sample_last_layer(trunk, x, y, doxa.HMC(draws=100, burn_in=100, leapfrog=8), 2, 0)
    p = posterior.predict(x)
    weights = {k: v[0] for k, v in trunk.draw(1).items()}
    for s in (0, 199):
        drawn = {"2.weight": posterior.weight[s].float(), "2.bias": posterior.bias[s].float()}
        f = trunk.model.forward({**weights, **drawn}, x)
        torch.testing.assert_close(p.samples[s].float(), f, rtol=1e-4, atol=1e-4)
    near = closeness_to(posterior, x, y, x, 400, 400)
    variation = {name: row["total_variation"] for name, row in near.items()}
    assert min(variation, key=lambda name: variation[name]) == "laplace-polished"
    assert variation["laplace-polished"] < 0.01 < variation["laplace-last-diagonal"]
    assert near["laplace-polished"]["agreement"] > 0.98


def test_closeness_is_that_of_stored_probabilities() -> None:
    """Chains of two seeds that say .6 and .8 are .7 together: a method that says .9 is .2 away, and
    each of the two .2 from the other."""
    stored = lambda p: {"probs": packed(torch.tensor([[p, 1 - p]] * 3))}  # noqa: E731
    cells = {"map": [stored(0.9)], CHAINS: [stored(0.6), stored(0.8)], "swag": [stored(0.1)]}
    table = chains_table("title", cells)
    assert [row[:3] for row in table.rows] == [
        ["map", "1.000", "0.200"],
        [CHAINS, "1.000 ± 0.000", "0.200 ± 0.000"],
        ["swag", "0.000", "0.600"],
    ]
    assert not chains_table("title", {"map": [stored(0.9)]}).rows


def test_regression_methods_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="gp is for regression"):
        ood_cell(tmp_path, "mnist", "gp")
    with pytest.raises(MethodError, match="no image protocol"):
        ood_cell(tmp_path, "mnist", "nothing")
    with pytest.raises(MethodError, match="scale"):
        ood_cell(tmp_path, "mnist", "map", scale="tiny")
    with pytest.raises(DataError, match="is not there"):
        ood_cell(tmp_path, "mnist", "map")
    with pytest.raises(DataError, match="no image set"):
        load_images(tmp_path, "svhn")
    with pytest.raises(DataError, match="no method 'hmc' here"):
        MNIST.tasks(tmp_path, None, ["hmc"])
    with pytest.raises(MethodError, match="CamVid is run with"):
        scenes.description("laplace", scenes.SMALL)


def test_every_table_is_found_by_its_name_and_refused_by_the_library() -> None:
    """The names for which `doxa bench` points to this repository are those that it has."""
    from doxa.app.bench import find

    assert list(TABLES) == [table.name for table in TABLES.values()]
    for name in TABLES:
        with pytest.raises(MethodError, match=f"python -m benchmarks.images {name}"):
            find(name)
    with pytest.raises(MethodError, match="no benchmark 'mnis'"):
        find("mnis")


def test_tasks_name_their_cells(tmp_path: Path) -> None:
    tasks = OOD.tasks(tmp_path, ["mnist"], ["map", "gp"], "cpu", 3)
    assert [task.key for task in tasks] == [
        {"table": "ood", "set": "mnist", "method": m, "seed": 3} for m in ("map", "gp")
    ]
    assert len(OOD.tasks(tmp_path)) == 2 * (len(PROTOCOLS) - 1)  # chains on all weights: few rows
    with pytest.raises(DataError, match="did you mean 'mnist'"):
        OOD.tasks(tmp_path, ["mnst"])
    with pytest.raises(DataError, match="did you mean 'laplace'"):
        CIFAR.tasks(tmp_path, None, ["laplaces"])


def test_patches_tile_the_image() -> None:
    image = torch.arange(2 * 3 * 72 * 96, dtype=torch.float32).reshape(2, 3, 72, 96)
    cut = patches(image)
    assert cut.shape == (12, 3, 32, 32)
    assert torch.equal(cut[0], image[0, :, :32, :32])
    assert torch.equal(cut[5], image[0, :, 32:64, 64:96])
    assert torch.equal(cut[6], image[1, :, :32, :32])


def test_the_unet_sees_the_whole_scene_and_keeps_its_size() -> None:
    net = unet(3, 11, 8)
    x = torch.rand(2, 3, 24, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = net(x)
    assert out.shape == (2, 11, 24, 32)
    (grad,) = torch.autograd.grad(out[0, :, 12, 16].sum(), x)
    assert (grad[0].abs().sum(0) > 0).double().mean() > 0.9  # GroupNorm alone reaches everywhere
    assert grad[1].abs().max() == 0  # no row depends on another
    assert doxa.nets.builder_of(net) == (
        "unet", {"inputs": 3, "outputs": 11, "width": 8, "dropout": 0.0},
    )  # fmt: skip


def test_panels_survive_their_packing() -> None:
    rng = np.random.default_rng(0)
    panel = scenes.Panel(7, rng.integers(0, 12, (72, 96)), rng.uniform(0, 0.8, (72, 96)))
    again = scenes.unpack(json.loads(json.dumps(plain(scenes.pack(panel)))))
    assert again.frame == 7 and np.array_equal(again.predicted, panel.predicted)
    assert np.abs(again.epistemic - panel.epistemic).max() <= 0.8 / 255 / 2 + 1e-9
    nothing = scenes.Panel(0, panel.predicted, np.zeros((72, 96)))
    assert scenes.unpack(scenes.pack(nothing)).epistemic.max() < 1e-9
    assert np.array_equal(coloured(np.array([[3]]))[0, 0], PALETTE[3])


@pytest.mark.slow
def test_corruptions_are_averaged_by_severity(tmp_path: Path) -> None:
    row = {"level": 9.0, "log_likelihood": -1.0, "entropy": 1.0, "mutual_information": 0.1}
    kinds = {
        "blur": [{**row, "accuracy": 0.9}, {**row, "accuracy": 0.5}],
        "noise": [{**row, "accuracy": 0.9}, {**row, "accuracy": 0.1}],
    }
    means = mean_over_shifts(kinds)
    assert [m["level"] for m in means] == [0, 1]
    assert [m["accuracy"] for m in means] == pytest.approx([0.9, 0.3])
    path = rotation_figure({"map": means, "unheard-of": means}, tmp_path / "figure.png")
    assert path.stat().st_size > 5_000


def test_ignored_pixels_count_nowhere() -> None:
    """A net that is right on every labelled pixel has IoU 1, whatever the unlabelled ones say."""
    y = torch.randint(0, 11, (3, 8, 8), generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.one_hot(y, 11).permute(0, 3, 1, 2).float()
    y[:, :2] = scenes.UNLABELLED

    class AnalyticGradient:
        kind = "sample"

        def predict(self, x: torch.Tensor, n: int | None = None) -> doxa.Predictive:
            likelihood = doxa.Categorical(ignore_index=scenes.UNLABELLED)
            return doxa.Predictive(20.0 * x[None], likelihood)

    numbers, uncertainty = scenes.score(
        AnalyticGradient(), images_of(x, y), replace(scenes.SMALL, rows=2)
    )
    assert numbers["mean_iou"] == 1.0 and numbers["accuracy"] == 1.0
    assert uncertainty["wrong"] == {"entropy": 0.0, "mutual_information": 0.0}
    wrong, _ = scenes.score(
        AnalyticGradient(), images_of(x.roll(1, 1), y), replace(scenes.SMALL, rows=2)
    )
    assert wrong["mean_iou"] == 0.0 and wrong["accuracy"] == 0.0


def images_of(x: torch.Tensor, y: torch.Tensor) -> scenes.Scenes:
    return scenes.Scenes(x[:0], y[:0], x, y, ())


def test_seeds_side_by_side_are_rows_of_one_table(tmp_path: Path) -> None:
    """A set of MNIST's form, of scikit-learn's digits, is all that the table needs."""
    data = digits()
    x, x_test = ((255 * part[:, 0]).byte().numpy() for part in (data.x, data.x_test))
    np.savez(
        tmp_path / "mnist.npz", x_train=x, y_train=data.y.numpy(), x_test=x_test,
        y_test=data.y_test.numpy(),
    )  # fmt: skip
    store = Store(tmp_path / "cells.jsonl")
    tasks = MNIST.tasks(tmp_path, None, ["map"], None, 0, scale="small")
    compute(tasks, store, report=lambda line: None)
    (cell,) = store.cells(table="mnist")
    errors = [100 - 100 * seed["scores"]["accuracy"] for seed in cell["result"]["seeds"]]
    assert len(errors) == 3 and max(errors) < 60  # a guess is wrong nine times in ten
    (table,) = MNIST.tables(store)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["error %"].startswith(f"{sum(errors) / 3:.2f} ±") and row["cost"] == "1.0"
    assert table.rows[-1][1].startswith("published")


@pytest.mark.data
@needs_data
def test_data_come_as_described() -> None:
    assert DATA is not None
    data = load_images(DATA, "fashion_mnist", 500, 50)
    assert data.x.shape == (500, 1, 28, 28) and data.x_test.shape == (50, 1, 28, 28)
    assert list(data.outside) == ["mnist", "kmnist", "notmnist"]
    assert float(data.x.min()) == 0.0 and float(data.x.max()) == 1.0
    whole = load_images(DATA, "mnist")
    assert whole.x.mean() == pytest.approx(0.1307, abs=1e-4)
    cifar, full = load_images(DATA, "cifar10", 300, 60), load_images(DATA, "cifar10")
    assert cifar.x.shape == (300, 3, 32, 32) and len(cifar.y.unique()) == 10
    assert full.y.bincount().tolist() == [1000] * 10 and full.x_test.shape[0] == 2000
    # a part is a part of the whole, with the same labels
    index = (full.x - cifar.x[7]).abs().amax((1, 2, 3)).argmin()
    assert torch.equal(full.x[index], cifar.x[7]) and full.y[index] == cifar.y[7]
    street = load_scenes(DATA, 24, 6)
    assert street.x.shape == (24, 3, 72, 96) and len(street.classes) == 12
    assert int(street.y.max()) <= scenes.UNLABELLED


@pytest.mark.data
@needs_data
def test_an_ood_cell_end_to_end(tmp_path: Path) -> None:
    """A LeNet on 2,000 digits knows digits, and tells letters by their features."""
    store = Store(tmp_path / "cells.jsonl")
    tasks = OOD.tasks(DATA, ["mnist"], ["map", "laplace", "gp"], None, 0, scale="small")
    compute(tasks, store, report=lambda line: None)
    known = {c["key"]["method"]: c["result"] for c in store.cells(table="ood")}
    assert "for regression" in known["gp"]["refused"]
    for method in ("map", "laplace"):
        result = known[method]
        assert result["scores"]["accuracy"] > 0.6
        assert [row["level"] for row in result["rotation"]] == list(range(0, 181, 15))
        assert result["rotation"][6]["accuracy"] < 0.4 < result["rotation"][0]["accuracy"]
        assert result["ood"]["notmnist"]["density"]["auroc"] > 0.9
    titles = [table.title for table in OOD.tables(store)]
    assert sum("AUROC" in title for title in titles) == 1 and len(titles) == 9
    assert [path.name for path in OOD.figures(store, tmp_path)] == ["rotation.png"]


@pytest.mark.data
@needs_data
def test_a_camvid_cell_end_to_end(tmp_path: Path) -> None:
    store = Store(tmp_path / "cells.jsonl")
    tasks = CAMVID.tasks(DATA, None, ["mc-dropout"], None, 0, scale="small")
    compute(tasks, store, report=lambda line: None)
    (cell,) = store.cells(table="camvid")
    result = cell["result"]
    assert 0 < result["scores"]["mean_iou"] < 1 and len(result["scores"]["iou"]) == 11
    panel = scenes.unpack(result["panels"][1])
    assert panel.predicted.shape == (72, 96) and panel.epistemic.max() > 0
    (table,) = CAMVID.tables(store)
    assert table.rows[0][0] == "mc-dropout"


@pytest.mark.data
@pytest.mark.slow
@needs_data
def test_a_cifar_cell_end_to_end() -> None:
    assert DATA is not None
    result = cifar_cell(DATA, "cifar10", "deep-ensemble", scale="small")
    assert list(result["ood"]) == ["camvid"]
    assert len(result["corrupted"]) == 9
    assert all(len(rows) == 6 for rows in result["corrupted"].values())


def test_a_start_is_chosen_by_the_last_fifth_of_the_images(monkeypatch: Any) -> None:
    """A fit at rate r predicts y with log density −(y − r)²: the held-out targets are 3."""
    asked: list[tuple[int, Any]] = []

    class Posterior:
        def __init__(self, rate: float) -> None:
            self.rate, self.record = rate, SimpleNamespace(metadata={})

        def predict(self, x: Any, n: int) -> Any:
            return SimpleNamespace(log_prob=lambda y: -((y - self.rate) ** 2).float())

    class Sweep(list[Any]):
        specs: list[Any]

    def run(data: Any, s: Any, seed: int, method: Any, runs: Any = None, **how: Any) -> Any:
        rates = [how["lr"]] if runs is None else list(runs.grid["lr"])
        asked.append((len(data.x), rates))
        sweep = Sweep(Posterior(rate) for rate in rates)
        sweep.specs = [SimpleNamespace(hyper={"lr": rate}) for rate in rates]
        return sweep if runs is not None else sweep[0]

    monkeypatch.setattr(image_methods, "run", run)
    x, y = torch.zeros(10, 1), torch.tensor([1] * 8 + [3] * 2)
    data = Images("any", x, y, x, y)
    fit = image_methods._chosen("any", {"lr": (1.0, 3.5, 9.0)}, lr=0.1)
    posterior = fit(data, settings("cifar"), 0)
    assert asked == [(8, [1.0, 3.5, 9.0]), (10, [3.5])]
    assert posterior.record.metadata["choice"]["chosen"] == "{'lr': 3.5}"
    assert fit(data, settings("mnist"), 0).rate == 0.1
