"""Rows and fits at given hyper-parameters, for processes with inducing points."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import doxa

NOISE = 0.2


def rows(n: int = 30, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 2))
    y = np.sin(2 * x[:, :1]) + 0.3 * x[:, 1:] + NOISE * rng.normal(size=(n, 1))
    return torch.from_numpy(x), torch.from_numpy(y)


def fixed(data: Any, count: int, kernel: str = "rbf", **options: Any) -> Any:
    """At given hyper-parameters, with points among the rows, after one step."""
    return fixed_for(1, data, count, kernel, **options)


def fixed_for(steps: int, data: Any, count: int, kernel: str = "rbf", **options: Any) -> Any:
    """The same after so many steps."""
    settings = {"variance": 1.3} | ({} if kernel == "linear" else {"lengthscale": 0.9})
    method = options.pop("method", doxa.SparseGP)(
        kernel, inducing=count, learn_kernel=False, learn_inducing=False, **settings,
        **options.pop("settings", {}),
    )  # fmt: skip
    options = {"likelihood": doxa.Gaussian(noise=NOISE), "validation": None} | options
    return doxa.fit(None, data, method, steps=steps, **options)
