"""Mistakes with methods and settings: each is one of doxa's errors, with words that help, or a
documented result. None is a traceback of torch or numpy, and none is silent.

A row is what is done, the error, and what its message says: what is wrong, where, what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mistakes import (
    FRAME,
    LABELS,
    Row,
    X,
    Y,
    fit,
    listed,
    net,
    without,
)
from torch import nn

import doxa
from doxa.errors import (
    DataError,
    DoxaError,
    MethodError,
    ModelError,
    ShapeError,
    UnknownSetting,
)  # fmt: skip

nan, inf = float("nan"), float("inf")

METHODS: dict[str, Row] = {
    "a name misspelt": (
        lambda: fit(method="deep-ensembel"), MethodError, "did you mean 'deep-ensemble'",
    ),
    "a name that nothing has": (lambda: fit(method="quantum"), MethodError, "known: .*list all"),
    "a number": (lambda: fit(method=3), MethodError, "a name or a method object, not 3"),
    "another class": (lambda: fit(method=dict), MethodError, "a name or a method object"),
    "nothing": (lambda: fit(method=None), MethodError, "a name or a method object, not None"),
    "a setting misspelt": (
        lambda: doxa.HMC(drwas=1), UnknownSetting, "HMC has no setting 'drwas'.*'draws'",
    ),
    "a setting of fit": (
        lambda: doxa.MAP(lr=0.1), UnknownSetting,
        r"MAP has no setting 'lr'.*doxa.fit\(\.\.\., lr=0\.1\)",
    ),
    "a setting of the method": (
        lambda: fit(method="hmc", draws=10), UnknownSetting,
        r"no keyword 'draws'.*doxa\.HMC\(draws=10\)",
    ),
    "a keyword misspelt": (lambda: fit(epoch=3), UnknownSetting, "no keyword 'epoch'.*'epochs'"),
    "a keyword of sample": (
        lambda: doxa.sample(lambda p: -p["a"] ** 2, {"a": 0.0}, "hmc", leapfrog=3), UnknownSetting,
        r"doxa\.HMC\(leapfrog=3\)",
    ),
    "too many settings": (lambda: doxa.MAP(*range(99)), UnknownSetting, "MAP has .* by keyword"),
    "draws as a word": (
        lambda: doxa.HMC(draws="many"), MethodError, "draws must be a whole number",
    ),
    "no draws": (lambda: doxa.HMC(draws=0), MethodError, "draws must be .* at least 1"),
    "half a draw": (lambda: doxa.HMC(draws=2.5), MethodError, "draws must be a whole number"),
    "a share above one": (
        lambda: doxa.HMC(target_accept=1.5), MethodError, "target_accept must be",
    ),
    "NaN": (lambda: doxa.MeanField(temperature=nan), MethodError, "temperature must be.*finite"),
    "a flag as a word": (lambda: doxa.GP(ard="yes"), MethodError, "ard must be True or False"),
    "a choice that is none": (
        lambda: doxa.Laplace(structure="ful"), MethodError, "structure must be one of",
    ),
    "classes by regression": (
        lambda: doxa.fit(None, (X, LABELS), "linear", likelihood="categorical"), MethodError,
        "regression with Gaussian noise, not categorical",
    ),
    "no network": (lambda: doxa.fit(None, (X, Y), "map"), ModelError, "map needs a network"),
    "a network for gp": (
        lambda: fit(method="gp"), ModelError, "would not use the network: pass None",
    ),
    "features twice": (
        lambda: fit(method=doxa.BayesianLinear(features="rbf")), MethodError,
        "features and a network",
    ),
}  # fmt: skip

SETTINGS: dict[str, Row] = {
    "validation above one": (lambda: fit(validation=1.5), DataError, "validation=1.5"),
    "validation in words": (lambda: fit(validation="some"), MethodError, "validation must be"),
    "validation of other columns": (
        lambda: fit(validation=(X[:, :2], Y)), ShapeError, "validation x",
    ),
    "validation frame of other columns": (
        lambda: fit(data=(FRAME, Y), validation=(FRAME.rename(columns={"age": "alter"}), Y)),
        DataError,
        "validation x lacks the column 'age' and has 'alter'",
    ),
    "validation with NaN": (
        lambda: fit(validation=(without(nan), Y)), DataError, "validation x is nan at row 7",
    ),
    "no members": (lambda: fit(members=0), MethodError, "members must be"),
    "members twice": (lambda: fit(members=[1, 1]), MethodError, "distinct"),
    "no steps": (lambda: fit(steps=0), MethodError, "steps must be"),
    "steps and epochs": (lambda: fit(steps=1, epochs=1), MethodError, "not both"),
    "epochs in words": (lambda: fit(epochs="ten"), MethodError, "epochs must be"),
    "a rate below zero": (lambda: fit(lr=-1), MethodError, "lr must be a positive number"),
    "a batch of nothing": (lambda: fit(batch_size=0), MethodError, "batch_size must be"),
    "a schedule that is none": (lambda: fit(schedule="step"), MethodError, "schedule.*cosine"),
    "a schedule that gives nothing": (
        lambda: fit(schedule=lambda s: None), MethodError, "schedule",
    ),
    "an optimiser that is none": (lambda: fit(optimizer="adamw2"), MethodError, "optimizer"),
    "an optimiser of torch": (lambda: fit(optimizer=torch.optim.Adam), MethodError, "optimizer"),
    "a device that is none": (lambda: fit(device="gpu"), MethodError, "device 'gpu'"),
    "a device as a float": (lambda: fit(device=0.5), MethodError, "device 0.5"),
    "a type of whole numbers": (lambda: fit(dtype=torch.int32), MethodError, "floating"),
    "a type of numpy": (lambda: fit(dtype=np.float64), MethodError, "floating torch.dtype"),
    "a seed in words": (lambda: fit(seed="lucky"), MethodError, "seed must be a whole number"),
    "a seed of halves": (lambda: fit(seed=0.5), MethodError, "seed must be a whole number"),
    "no seed": (lambda: fit(seed=None), MethodError, "seed must be a whole number"),
    "standardize in words": (
        lambda: fit(standardize="no"), MethodError, "standardize must be True or False",
    ),
    "patience of nothing": (lambda: fit(patience=0), MethodError, "patience must be"),
    "seconds in words": (
        lambda: fit(checkpoint_every="often"), MethodError, "checkpoint_every must be",
    ),
    "an engine that is none": (lambda: fit(engine="rocket"), MethodError, "'stack' or 'loop'"),
    "a likelihood misspelt": (lambda: fit(likelihood="gausian"), ModelError, "gaussian"),
    "a likelihood of torch": (lambda: fit(likelihood=nn.MSELoss()), ModelError, "likelihood"),
    "a likelihood's class": (lambda: fit(likelihood=doxa.StudentT), ModelError, r"StudentT\(\)"),
    "noise below zero": (
        lambda: fit(likelihood=doxa.Gaussian(noise=-1)), ModelError, "noise must be positive",
    ),
    "noise in words": (
        lambda: fit(likelihood=doxa.Gaussian(noise="low")), ModelError, "noise must be positive",
    ),
    "noise of three outputs": (
        lambda: fit(likelihood=doxa.Gaussian(noise=(1.0, 1.0, 1.0))), ModelError,
        r"\(3,\).*one number",
    ),
    "a prior that matches nothing": (
        lambda: fit(prior={"nowhere.*": doxa.Normal()}), ModelError, "matches no parameter",
    ),
    "a prior of no width": (lambda: fit(prior=doxa.Normal(-1.0)), ModelError, "std"),
    "a prior in words": (lambda: fit(prior=doxa.Normal("wide")), ModelError, "std"),
    "a prior's class": (lambda: fit(prior=doxa.Normal), ModelError, r"Normal\(\)"),
    "a prior that is a number": (lambda: fit(prior=1.0), ModelError, "prior"),
    "a subset of nothing": (
        lambda: fit(method="mean-field", subset=lambda n: False), ModelError, "no trainable",
    ),
    "a subset misspelt": (lambda: fit(method="laplace", subset="last"), ModelError, "last_layer"),
    "init that is none": (lambda: fit(init="zeros"), MethodError, "'fresh' or 'given'"),
    "init given, another network": (
        lambda: fit(net(1, 5), init="given"), ModelError, "one row of x",
    ),
    "a callback that is none": (lambda: fit(callbacks=[3]), MethodError, "callbacks.*3"),
    "a callback without a list": (lambda: fit(callbacks=print), MethodError, r"callbacks=\[.*\]"),
    "rows as a number": (lambda: fit(runs=doxa.Runs(rows=[3])), DataError, "a run's rows"),
    "rows out of range": (lambda: fit(runs=doxa.Runs(rows=[[0, 99]])), DataError, "0 … 19, not 99"),
    "rows of halves": (lambda: fit(runs=doxa.Runs(rows=[[0.5]])), DataError, "whole numbers"),
    "a mask too short": (
        lambda: fit(runs=doxa.Runs(rows=[[True] * 5])), DataError, "mask.* 5 .*20",
    ),
    "a grid over nothing known": (
        lambda: fit(runs=doxa.Runs(grid={"rate": [1, 2]})), MethodError,
        "unknown fields.*'rate'.*lr",
    ),
    "a grid of one number": (
        lambda: fit(runs=doxa.Runs(grid={"lr": 0.1})), MethodError, "lr.*list",
    ),
    "a grid of words": (lambda: fit(runs=doxa.Runs(grid={"lr": ["a"]})), MethodError, "lr"),
    "runs as a dict": (lambda: fit(runs={"lr": [1, 2]}), MethodError, r"doxa\.Runs\("),
    "runs as a number": (lambda: fit(runs=5), MethodError, r"doxa\.Runs\("),
}  # fmt: skip


@pytest.mark.parametrize("mistake, error, words", listed(method=METHODS, settings=SETTINGS))
def test_a_mistake_is_named(mistake: Callable[[], Any], error: type[DoxaError], words: str) -> None:
    with pytest.raises(error, match=words):
        mistake()
