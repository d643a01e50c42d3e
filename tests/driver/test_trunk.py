"""The outputs of a frozen trunk are computed once for the data, and change no result.

What each test guards against was tried once in the code: dropout on in the trunk, BatchNorm that
learns in it, outputs of other rows, a head that starts from other random numbers, a posterior that
keeps the head, and a cache that is used for rows that change.
"""

from __future__ import annotations

import copy
import errno
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import doxa
from doxa import store
from doxa.driver import trunk as module
from doxa.errors import BaseMismatch, MethodError, ModelError
from doxa.registry import get_method

ROWS = 60


def rows(count: int = ROWS, classes: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 5, 5, generator=g, dtype=torch.float64)
    if classes:
        return x, torch.randint(classes, (count,), generator=g)
    return x, x.mean((1, 2, 3)) + 0.1 * torch.randn(count, generator=g, dtype=torch.float64)


class Counted(nn.Conv2d):
    """Counts the rows that pass through it."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.seen += len(x)
        return super().forward(x)


class Gated(nn.Module):
    """No sequence: x is read after the trunk, two frozen layers are, and one output is named."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.pool = Counted(1, 4, 3), nn.AdaptiveAvgPool2d(1)
        self.gate, self.head = nn.Linear(25, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.pool(self.body(x).tanh()).flatten(1)
        return {"logits": self.head(h * self.gate(x.flatten(1)).sigmoid())}


def network(outputs: int = 1, kind: str = "sequence") -> nn.Module:
    torch.default_generator.manual_seed(0)
    net: Any
    if kind == "gated":
        net = Gated(outputs)
        net.body.requires_grad_(False)
        return net.double()
    last = {"sequence": [nn.Dropout(0.2), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)],
            "linear": [nn.Linear(4, outputs)]}[kind]  # fmt: skip
    net = nn.Sequential(
        Counted(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Conv2d(4, 4, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *last,
    )  # fmt: skip
    net[:8].requires_grad_(False)
    net[1].running_var.fill_(0.5)
    return net.double()


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "map": ("map", {}),
    "deep-ensemble": ("deep-ensemble", {"members": 2}),
    "laplace": (doxa.Laplace(), {"subset": "last_layer"}),
    "swag": (doxa.SWAG(rank=2, cycle=2), {}),
    "mean-field": ("mean-field", {}),
    "last-layer-vi": ("last-layer-vi", {}),
    "mc-dropout": ("mc-dropout", {"members": 2}),
    "sgld": (doxa.SGLD(draws=8, burn_in=8, thin=2), {}),
    "hmc": (doxa.HMC(draws=4, burn_in=4, leapfrog=4), {"members": 2}),
}


def both(net: nn.Module, data: Any, method: Any, **options: Any) -> list[Any]:
    """The same fit, with the trunk's outputs computed once and in every pass."""
    settings = {"steps": 20, "batch_size": 16, "progress": False, "validation": 0.2} | options
    found = []
    for keep in (True, False):
        found.append(doxa.fit(net, data, method, trunk_outputs=keep, **settings))
    assert found[0].diagnostics.get("trunk") == "once"
    assert found[1].diagnostics.get("trunk") == "in every pass"
    return found


def same(one: Any, other: Any, rtol: float = 1e-9) -> None:
    ours, theirs = one.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=rtol)
    assert one.status == other.status
    if one.validation is not None:
        assert one.validation == pytest.approx(other.validation, rel=1e-7)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("classes", [0, 3])
def test_the_results_are_those_of_every_pass(name: str, classes: int) -> None:
    """Held-out rows and predictions too, for regression and classification."""
    method, options = METHODS[name]
    net = network(classes or 1)
    likelihood = "categorical" if classes else "gaussian"
    one, other = both(net, rows(classes=classes), method, likelihood=likelihood, **options)
    same(one, other)
    x, _ = rows(7)
    p, q = one.predict(x, n=6 if name not in ("map", "deep-ensemble") else None), None
    q = other.predict(x, n=6 if name not in ("map", "deep-ensemble") else None)
    ours, theirs = (v.probs if classes else v.mean for v in (p, q))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "sequence", "gated"])
@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_one_step_and_a_hundred(kind: str, engine: str) -> None:
    """Each form of the trained part, in both engines: 1e-10 after one step, 1e-9 after 100."""
    for steps, tolerance in ((1, 1e-10), (100, 1e-9)):
        options = {"members": 2, "engine": engine, "steps": steps, "validation": None}
        same(*both(network(kind=kind), rows(), "deep-ensemble", **options), rtol=tolerance)


def test_the_trunk_runs_once_for_the_data() -> None:
    """Five members and 50 steps: the rows pass a few times, and not once per member and step. A
    prediction of many draws passes once."""
    Counted.seen = 0
    posterior = doxa.fit(
        network(), rows(), "mean-field", members=5, steps=50, validation=0.2, progress=False
    )
    assert Counted.seen < 8 * ROWS
    Counted.seen = 0
    posterior.predict(rows(30)[0], n=40)
    assert Counted.seen <= 34
    assert all(p.requires_grad == ("8." in n or "9." in n or "11." in n)
               for n, p in posterior.network.net.named_parameters())  # fmt: skip


@pytest.mark.parametrize("keep", [True, False])
def test_nothing_frozen_has_members(keep: bool) -> None:
    """No weights, and no statistics of the trunk's BatchNorm."""
    posterior = doxa.fit(
        network(), rows(), "deep-ensemble", members=3, steps=5, progress=False, trunk_outputs=keep
    )
    assert posterior.samples.shape[-1] == posterior.layout.size == 4 * 3 + 3 + 3 + 1 + 1
    assert posterior.buffers == {}
    assert not any(name.startswith(("0.", "1.", "4.")) for name in posterior.layout.names)


def test_heads_on_frozen_features_start_from_the_same_numbers() -> None:
    """The weights of new heads are drawn in the order of the whole network's layers."""
    net = network(kind="linear").requires_grad_(True)
    method = doxa.DeepEnsemble(features="frozen")
    same(*both(net, rows(), method, members=2, init="given", steps=1))


def test_dropout_and_batch_norm_rest_in_the_trunk() -> None:
    """The trunk in a prediction and in training is the given network in evaluation mode, and
    dropout before a trained layer is on."""
    net = network()
    posterior = doxa.fit(net, rows(), "mc-dropout", steps=5, validation=None, progress=False)
    x, _ = rows(9)
    assert list(posterior.network.sites) == ["8.uniform"]
    split = posterior.network.split(x)
    torch.testing.assert_close(split.features(x), net.eval()[:8](x), rtol=0, atol=0)  # type: ignore[index]
    assert posterior.predict(x, n=20).samples.std(0).min() > 0
    state = posterior.network.net.state_dict()
    assert torch.equal(state["1.running_var"], net.state_dict()["1.running_var"])


def test_a_subset_is_no_trunk() -> None:
    """`subset="last_layer"` says what is uncertain; the layers before it are trained as a point."""
    net = nn.Sequential(nn.Linear(25, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = rows()
    posterior = doxa.fit(
        net, (x.flatten(1), y), "laplace", subset="last_layer", init="fresh", steps=30,
        progress=False,
    )  # fmt: skip
    start = doxa.fit(
        net, (x.flatten(1), y), "laplace", subset="last_layer", init="fresh", steps=1, lr=1e-12,
        progress=False,
    )  # fmt: skip
    first = posterior.layout.slices["0.weight"]
    assert posterior.network.trunk is None
    assert (posterior.mean[:, first] - start.mean[:, first]).abs().min() > 1e-4


def test_frozen_features_of_vi_are_no_weights() -> None:
    net = network(kind="linear").requires_grad_(True)
    posterior = doxa.fit(
        net, rows(), doxa.LastLayerVI(features="frozen"), init="given", steps=5, progress=False
    )
    assert posterior.layout.names == ("8.weight", "8.bias", "likelihood.log_noise")
    assert posterior.diagnostics["trunk"] == "once"


def test_a_trunk_by_name(tmp_path: Path) -> None:
    """`trunk=` freezes layers, also those that do little work, and is known on loading."""
    net = nn.Sequential(nn.Sequential(nn.Linear(25, 2), nn.Dropout(0.5)), nn.Linear(2, 400),
                        nn.Linear(400, 1)).double()  # fmt: skip
    model = doxa.Model(net, trunk="0")
    assert all(p.requires_grad for p in net.parameters())
    x, y = rows()
    posterior = doxa.fit(model, (x.flatten(1), y), "map", steps=3, progress=False)
    assert posterior.diagnostics["trunk"] == "once"
    assert not any(name.startswith("0.") for name in posterior.layout.names)
    assert posterior.network.sites == {}  # the dropout in it is off
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net)
    assert torch.equal(again.predict(x.flatten(1)).mean, posterior.predict(x.flatten(1)).mean)
    with pytest.raises(ModelError, match="there is no layer 'body'"):
        doxa.Model(net, trunk="body")


def test_runs_and_their_scales() -> None:
    """Splits that scale x in their own way have outputs of their own; so has a cross-fitted
    network."""
    splits = [torch.arange(40), torch.arange(20, 60)]
    runs = doxa.Runs(rows=splits)
    settings: dict[str, Any] = {"steps": 20, "standardize": True, "progress": False, "runs": runs}
    ours, theirs = (
        doxa.fit(network(), rows(), "map", trunk_outputs=keep, validation=0.2, **settings)
        for keep in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.diagnostics["trunk"] == "once"
        same(one, other)
        torch.testing.assert_close(one.predict(rows(5)[0]).mean, other.predict(rows(5)[0]).mean)
    same(*both(network(), rows(), "map", validation="auto", steps=10))


class Stop(Exception):
    pass


def test_a_resumed_fit_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def stop(step: int, _info: Any) -> None:
        if step >= 12:
            raise Stop

    options: dict[str, Any] = {
        "members": 2, "steps": 20, "batch_size": 16, "progress": False, "checkpoint_every": 0.0
    }  # fmt: skip
    whole = doxa.fit(network(), rows(), "deep-ensemble", **options)
    with pytest.raises(Stop):
        doxa.fit(
            network(), rows(), "deep-ensemble", checkpoint=tmp_path / "run", callbacks=[stop],
            **options,
        )  # fmt: skip
    saved = store.Checkpoints(tmp_path / "run").latest()
    assert saved is not None  # with nothing of the trunk
    assert all(v.numel() <= 2 * whole.layout.size for v in saved.tensors.values())
    again = doxa.fit(network(), rows(), "deep-ensemble", checkpoint=tmp_path / "run", **options)
    assert torch.equal(again.samples, whole.samples)
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(2)  # type: ignore[index,operator]
    with pytest.raises(MethodError, match="another fit"):
        doxa.fit(other, rows(), "deep-ensemble", checkpoint=tmp_path / "run", **options)


def test_saved_and_loaded(tmp_path: Path) -> None:
    posterior = doxa.fit(network(), rows(), "mean-field", steps=5, progress=False)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=network())
    x, _ = rows(9)
    assert again.network.at_rest == posterior.network.at_rest
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)
    Counted.seen = 0
    again.predict(x, n=40)
    assert Counted.seen <= 13


def test_a_posterior_is_copied_and_pickled() -> None:
    x, _ = rows(9)
    net = network(kind="gated")
    posterior = doxa.fit(net, rows(), "deep-ensemble", members=2, steps=3, progress=False)
    wanted = posterior.predict(x).mean
    again = pickle.loads(pickle.dumps(posterior))  # noqa: S301 - written in the line itself
    for other in (copy.deepcopy(posterior), again):
        assert torch.equal(other.predict(x).mean, wanted)


class Rows(Dataset[Any]):
    """Rows that are too large to be read at once, as far as `fit` knows; `noise` augments them."""

    def __init__(self, noise: float) -> None:
        self.x, self.y = rows()
        self.noise = noise
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        g = torch.Generator().manual_seed(self.reads)
        noise = self.noise * torch.randn(self.x[i].shape, generator=g, dtype=torch.float64)
        return self.x[i] + noise, self.y[i]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_rows_that_change_are_not_kept(
    noise: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("doxa.data.rows.free_memory", lambda *_: 800)
    data = Rows(noise)
    with caplog.at_level(logging.WARNING, "doxa"):
        posterior = doxa.fit(
            network(), data, "map", steps=50, batch_size=16, validation=None, progress=False
        )
    kept = noise == 0
    assert posterior.diagnostics["trunk"] == ("once" if kept else "in every pass")
    assert ("differ between two reads" in caplog.text) != kept
    if kept:
        assert data.reads < 6 * ROWS  # and not one read per step and row
        plain = doxa.fit(
            network(), rows(), "map", steps=50, batch_size=16, validation=None, progress=False,
            trunk_outputs=False,
        )  # fmt: skip
        torch.testing.assert_close(posterior.samples, plain.samples, rtol=1e-9, atol=1e-9)


class Drawing(nn.Module):
    """A frozen layer that draws random numbers, also in evaluation mode, for several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        noise = 0.1 * torch.randn_like(x) if len(x) > 2 else 0.0
        return x * self.weight + noise


def test_a_trunk_that_draws_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Flatten(), Drawing(), nn.Linear(25, 1)).double()
    model = doxa.Model(net, trunk="1")
    posterior = doxa.fit(model, rows(), "map", steps=3, progress=False, validation=None)
    assert posterior.diagnostics["trunk"] == "in every pass"


def test_outputs_beyond_the_budget_are_on_disk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same bits as in memory; with a full disk the trunk runs in every pass."""
    options: dict[str, Any] = {"steps": 20, "validation": 0.2, "progress": False}
    memory = doxa.fit(network(), rows(), "map", **options)
    monkeypatch.setattr(module, "free_memory", lambda *_: 64)
    with caplog.at_level(logging.INFO, "doxa"):
        disk = doxa.fit(network(), rows(), "map", **options)
    assert "on disk" in caplog.text and torch.equal(disk.samples, memory.samples)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with caplog.at_level(logging.WARNING, "doxa"):
        posterior = doxa.fit(network(), rows(), "map", **options)
    assert "the disk is full" in caplog.text
    assert posterior.diagnostics["trunk"] == "in every pass"
    torch.testing.assert_close(posterior.samples, memory.samples, rtol=1e-9, atol=1e-9)


def test_a_named_folder_is_used_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 5, "validation": None, "progress": False}
    first = doxa.fit(network(), rows(), "map", trunk_outputs=tmp_path, **options)
    (kept,) = tmp_path.iterdir()
    assert store.is_artefact(kept)
    Counted.seen = 0
    again = doxa.fit(network(), rows(), "map", trunk_outputs=tmp_path, **options)
    assert torch.equal(first.samples, again.samples)
    few = Counted.seen
    changed = network()
    with torch.no_grad():
        changed[0].weight.mul_(2)  # type: ignore[index,operator]
    doxa.fit(changed, rows(), "map", trunk_outputs=tmp_path, **options)
    x, y = rows()
    doxa.fit(network(), (2 * x, y), "map", trunk_outputs=tmp_path, **options)
    assert len(list(tmp_path.iterdir())) == 3  # a key of the rows and of the trunk
    Counted.seen = 0
    doxa.fit(network(), rows(), "map", **options)
    assert few <= Counted.seen


def test_a_reference_to_the_base(tmp_path: Path) -> None:
    """The file holds no frozen parameter; the same base gives the same predictions, and another one
    is an error."""
    posterior = doxa.fit(network(), rows(), "deep-ensemble", steps=5, members=2, progress=False)
    posterior.save(tmp_path / "run", frozen=False)
    tensors, _ = store.read_artefact(tmp_path / "run")
    assert not any(name.startswith(("net.0.", "net.4.")) for name in tensors)
    x, _ = rows(9)
    again = doxa.load(tmp_path / "run", net=network())
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)
    for name in ("0.weight", "1.weight"):
        other = copy.deepcopy(network())
        other.state_dict()[name].mul_(1 + 1e-12)
        with pytest.raises(BaseMismatch, match="those of the network are"):
            doxa.load(tmp_path / "run", net=other)


def test_methods_that_read_x_have_x(caplog: pytest.LogCaptureFixture) -> None:
    """Adversarial training moves the rows of x."""
    with caplog.at_level(logging.INFO, "doxa"):
        posterior = doxa.fit(
            network(), rows(), doxa.DeepEnsemble(adversarial=0.01), members=2, steps=3,
            progress=False,
        )  # fmt: skip
    assert posterior.diagnostics["trunk"] == "in every pass" and "reads the inputs" in caplog.text


SMALL: dict[str, dict[str, Any]] = {
    "swag": {"rank": 2, "cycle": 1, "average": 0.5}, "hmc": {"draws": 3, "burn_in": 3},
    "nuts": {"draws": 3, "burn_in": 4}, "snapshot": {"cycles": 2}, "cyclical": {"cycles": 2},
}  # fmt: skip
READS = {"linear", "ntk", "fbnn", "vip", "functional-prior"}  # x itself
FEW = {"draws": 4, "burn_in": 4, "thin": 1}


@pytest.mark.slow
@pytest.mark.parametrize("row", list(doxa.methods()), ids=lambda row: row.name)
def test_every_method_gives_the_results_of_every_pass(row: Any) -> None:
    method = get_method(row.name)
    if not method.needs_network and row.name not in ("linear", "ntk"):
        pytest.skip("it takes no network")
    settings = SMALL.get(row.name, FEW if row.family.lower().startswith("mc") else {})
    fields = method.__dataclass_fields__
    method = method(**{k: v for k, v in settings.items() if k in fields})
    torch.default_generator.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 8), nn.Tanh(), nn.Dropout(0.2),
        nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1),
    ).double()  # fmt: skip
    net[:5].requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=g, dtype=torch.float64)
    one, other = (
        doxa.fit(
            net, (x, 0.3 * x.sum(1)), method, likelihood="gaussian", steps=12, batch_size=10,
            trunk_outputs=keep, progress=False, validation=0.2 if method.holds_out else None,
        )
        for keep in (True, False)
    )  # fmt: skip
    expected = "in every pass" if row.name in READS else "once"
    assert one.diagnostics["trunk"] == expected
    same(one, other)
    torch.testing.assert_close(one.predict(x).mean, other.predict(x).mean, rtol=1e-9, atol=1e-9)


def test_what_trunk_outputs_may_be() -> None:
    with pytest.raises(MethodError, match="True, False or a folder, not int"):
        doxa.fit(network(), rows(), "map", steps=1, progress=False, trunk_outputs=3)  # type: ignore[arg-type]
