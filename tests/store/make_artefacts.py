"""Makes the artefacts that `test_artefacts.py` loads: one small one of each kind.

    PYTHONPATH=src:tests/support python tests/store/make_artefacts.py [NAME ...]

Beside each posterior lie inputs, targets and the answers of the code that saved it, so that what
people have saved goes on meaning the same. They are made once: a later version of doxa must read
them as they are. Only a new kind, or a new format, adds to them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from artefact_cases import (
    CASES,
    DRAWS,
    FOLDER,
    answers,
    answers_of_draws,
    batch_norm_net,
    facts,
    log_density,
)  # fmt: skip
from torch import Tensor

import doxa
from doxa import evaluate, store

ROWS, NEW = 24, 5
QUICK: dict[str, Any] = {
    "steps": 20, "batch_size": 8, "dtype": torch.float64, "progress": False, "engine": "loop:eager",
}  # fmt: skip


def rows(task: str, n: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two inputs; numbers far from standardised, counts, or classes."""
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 2, generator=g, dtype=torch.float64) - 1
    signal = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:]
    noisy = signal + 0.1 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    if task == "poisson":
        return x, noisy.exp().round()
    if task == "bernoulli":
        return x, (noisy > 0).double()
    if task == "categorical":
        return x, torch.bucketize(noisy[:, 0].contiguous(), torch.tensor([-0.5, 0.5]).double())
    return x, 5 + 10 * noisy


def net(outputs: int = 1, **options: Any) -> torch.nn.Module:
    return doxa.nets.mlp(2, outputs, hidden=(4,), activation="tanh", **options)


def fit(name: str, network: torch.nn.Module | None, **options: Any) -> Any:
    case = CASES[name]
    settings = {"likelihood": case.likelihood, **QUICK, **options}
    return doxa.fit(network, rows(case.likelihood), case.method, **settings)


def mixture() -> Any:
    parts = [
        fit("mixture", net(), standardize=True, members=3),
        fit("mixture", doxa.nets.mlp(2, 1, hidden=(3,)), standardize=True, members=3),
    ]
    return doxa.MixturePosterior(parts, [0.25, 0.75])


def recalibrated() -> Any:
    base = fit("recalibrated", net(3), members=3)
    return evaluate.recalibrate(base, rows("categorical", seed=2), "temperature")


def conformal() -> Any:
    base = fit("conformal", net(), members=3, standardize=True, likelihood=doxa.Gaussian(1.0))
    return evaluate.conformal(base, rows("gaussian", seed=2), 0.8, scaled=True)


def gaussian_prior() -> dict[str, Any]:
    return {"2.*": doxa.Normal(0.5), "*": doxa.FanInNormal()}


MAKERS: dict[str, Callable[[], Any]] = {
    "map-members": lambda: fit(
        "map-members", net(), members=3, standardize=True, validation=0.25, prior=gaussian_prior()
    ),
    "map-batch-norm": lambda: fit("map-batch-norm", batch_norm_net(2, 3), members=3),
    "sgld": lambda: fit("sgld", net(), members=2, standardize=True, prior=doxa.StudentTPrior()),
    "nuts": lambda: fit("nuts", net(), members=2, prior=doxa.LaplacePrior()),
    "mean-field": lambda: fit("mean-field", net(2), members=2, standardize=True),
    "mean-field-subset": lambda: fit(
        "mean-field-subset", net(), subset="last_layer", prior=doxa.ScaleMixture()
    ),
    "dropout-layers": lambda: fit("dropout-layers", net(dropout=0.2), members=2),
    "dropout-inserted": lambda: fit("dropout-inserted", net(3), standardize=True),
    "laplace": lambda: fit("laplace", net(), standardize=True),
    "laplace-diagonal": lambda: fit("laplace-diagonal", net(3), members=2, subset="last_layer"),
    "linear": lambda: fit("linear", None),
    "gp": lambda: fit("gp", None, standardize=True),
    "mixture": mixture,
    "recalibrated": recalibrated,
    "conformal": conformal,
}


def make(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        posterior = MAKERS[name]()
    x, y = rows(CASES[name].likelihood, NEW, seed=1)
    posterior.save(FOLDER / name / "posterior")
    told = answers(posterior, x, y)
    store.write_artefact(FOLDER / name / "answers", {"x": x, "y": y, **told}, facts(posterior))


def make_draws() -> None:
    draws = doxa.sample(
        log_density, {"loc": [0.0, 0.0], "scale": 1.0}, DRAWS, 2,
        constraints={"scale": "positive"}, engine="loop:eager", progress=False,
    )  # fmt: skip
    draws.save(FOLDER / "draws" / "draws")
    about = {"status": str(draws.status), "reason": draws.status.reason}
    store.write_artefact(FOLDER / "draws" / "answers", answers_of_draws(draws), about)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or [*MAKERS, "draws"]:
        if name == "draws":
            make_draws()
        else:
            make(name)


if __name__ == "__main__":
    main()
