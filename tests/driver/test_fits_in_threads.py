"""Fits in threads of one program, and inside modes that a program set: the bits of fits alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g)
    return x, x.sum(1).sin()


class Normed(nn.Module):
    """A network that runs under vmap, and changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).clamp(-2, 2))


NETS = {"plan": doxa.nets.mlp(2, 1, hidden=(6,)), "vmap": Normed()}
# Many initial weights, a recorded stage, a sampler, a module and layers that methods bring.
JOBS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("deep-ensemble", "plan", {}, {"members": 20, "steps": 20}),
    ("mean-field", "plan", {}, {"members": 2, "steps": 40, "engine": "stack:traced"}),
    ("sgld", "vmap", {"draws": 5, "burn_in": 5, "thin": 1}, {"members": 2}),
    ("flow-vi", "plan", {}, {"members": 2, "steps": 10}),
    ("mc-dropout", "vmap", {}, {"members": 2, "steps": 10}),
]


def fitted(job: int, seed: int) -> Tensor:
    """What is predicted, in all its bits."""
    name, net, settings, options = JOBS[job]
    method = doxa.get_method(name)(**settings)
    x, _ = rows()
    posterior = doxa.fit(
        NETS[net], rows(), method, seed=seed, likelihood="gaussian", progress=False, **options
    )
    p = posterior.predict(x, 20 if name != "sgld" else None)
    return torch.stack([p.mean, p.variance])


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """All at once; the first error of any is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(k: int) -> None:
        try:
            start.wait(60)
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def check(threads: int, seeds: int, jobs: list[int]) -> None:
    alone = {(job, seed): fitted(job, seed) for job in jobs for seed in range(seeds)}
    generator, call = torch.get_rng_state(), nn.Module.__call__

    def work(k: int) -> None:
        for i in range(len(jobs)):
            job = jobs[(i + k) % len(jobs)]  # different ones at a time
            for seed in range(seeds):
                assert torch.equal(fitted(job, seed), alone[job, seed]), (JOBS[job][0], seed)

    in_threads(threads, work)
    assert torch.equal(torch.get_rng_state(), generator), "the global generator moved"
    assert nn.Module.__call__ is call, "a recording left its patch behind"


@pytest.mark.slow
def test_a_few_threads_have_the_bits_of_fits_alone() -> None:
    check(threads=2, seeds=1, jobs=[0, 1, 2])


@pytest.mark.slow
def test_eight_threads_have_the_bits_of_fits_alone() -> None:
    """Eight threads × ten fits × five methods."""
    check(threads=8, seeds=10, jobs=list(range(5)))


def test_threads_that_predict_with_one_posterior() -> None:
    """The network of a posterior is one object: passes take turns."""
    x, _ = rows()
    posterior = doxa.fit(Normed(), rows(), "deep-ensemble", steps=5, members=3, progress=False)
    parts = [x[k : k + 3] for k in range(0, 30, 3)]
    want = [posterior.predict(part).samples for part in parts]
    features = posterior.features(x)

    def work(k: int) -> None:
        for _ in range(2):
            for part, own in zip(parts, want, strict=True):
                assert torch.equal(posterior.predict(part).samples, own)
            assert torch.equal(posterior.features(x), features)

    in_threads(4, work)


@contextmanager
def default_type() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "meta": partial(torch.device, "meta"), "no grad": torch.no_grad,
    "inference mode": torch.inference_mode, "float64": default_type,
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["map", "gp", "laplace"])
def test_modes_of_the_program_change_no_bit(mode: str, method: str) -> None:
    """A fit, its predictions, and those of a posterior that was fitted outside."""
    (x, y), net = rows(), None if method == "gp" else doxa.nets.mlp(2, 1, hidden=(6,))

    def answer(posterior: Any) -> Tensor:
        p = posterior.predict(x)
        return torch.stack([p.mean, p.variance])

    fit = partial(doxa.fit, net, (x, y), method, likelihood="gaussian", progress=False)
    steps = {} if method == "gp" else {"steps": 30}
    outside = fit(**steps)
    want = answer(outside)
    with MODES[mode]():
        assert torch.equal(answer(fit(**steps)), want)
        assert torch.equal(answer(outside), want)


def test_a_sampler_of_a_density_knows_no_mode_either() -> None:
    def draw() -> Tensor:
        square = lambda p: -(p["a"] ** 2).sum()  # noqa: E731
        return doxa.sample(square, {"a": [0.0, 0.0]}, doxa.HMC(draws=5, burn_in=5))["a"]

    want = draw()
    for mode in MODES.values():
        with mode():
            assert torch.equal(draw(), want)


def test_loading_leaves_the_generator_alone(tmp_path: Any) -> None:
    x, y = rows()
    net = doxa.nets.mlp(2, 1, hidden=(6,))
    doxa.fit(net, (x, y), "map", steps=5, progress=False).save(tmp_path / "run")
    generator = torch.get_rng_state()
    doxa.load(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), generator)
