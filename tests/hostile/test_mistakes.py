"""Typical mistakes in Python: each is one of doxa's errors, with words that help, or a documented
result. None is a traceback of torch or numpy, and none is silent.

A row is what is done, the error, and what its message says: what is wrong, where, what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from mistakes import (
    FRAME, LABELS, NAMES, After, D, Endless, N, TooLong, X, Y, chains, classes, exact, fit, loader,
    named, net, noisy_object, numbers, process, without,
)  # fmt: skip
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import doxa
from doxa import evaluate
from doxa.diagnose import doctor
from doxa.errors import (
    DataError, DoxaError, MethodError, ModelError, NumericalError, ShapeError, StoreError,
    Unavailable, UnknownSetting,
)  # fmt: skip

Row = tuple[Callable[[], Any], type[DoxaError], str]
nan, inf = float("nan"), float("inf")

DATA: dict[str, Row] = {
    "y of two columns": (lambda: fit(data=(X, torch.cat([Y, Y], 1))), ShapeError, r"\[20, 2\].*\[N, 1\]"),
    "y too short": (lambda: fit(data=(X, Y[:-1])), ShapeError, "x has 20 rows and y 19"),
    "y transposed": (lambda: fit(data=(X, Y.T)), ShapeError, "x has 20 rows and y 1"),
    "x transposed": (lambda: fit(data=(X.T, Y)), ShapeError, "x has 3 rows and y 20"),
    "x one column short": (lambda: fit(data=(X[:, :2], Y)), ModelError, r"one row of x.*\[1, 2\]"),
    "x without columns": (lambda: fit(data=(X[:, 0], Y)), ModelError, r"one row of x.*\[1\].*x\[:, None\]"),
    "x and y swapped": (lambda: fit(data=(Y, X)), ModelError, r"one row of x.*\[1, 1\]"),
    "y with an axis too many": (lambda: fit(data=(X, Y[..., None])), ShapeError, r"\[20, 1, 1\]"),
    "y one-hot": (
        lambda: fit(net(3), (X, torch.eye(3)[LABELS]), likelihood="categorical"),
        ShapeError, r"\[20, 3\].*\[N\].*argmax",
    ),
    "x a number": (lambda: fit(data=(torch.tensor(1.0), Y)), ShapeError, "x is a scalar"),
    "no pair": (lambda: fit(data=X), DataError, r"a pair \(x, y\)"),
    "three parts": (lambda: fit(data=(X, Y, Y)), DataError, r"a pair \(x, y\)"),
    "a file's name": (lambda: fit(data="data.csv"), DataError, r"a pair \(x, y\).*doxa fit"),
    "no y": (lambda: fit(data=(X, None)), DataError, "y is None"),
    "no x": (lambda: fit(data=(None, Y)), DataError, "x is None"),
    "x of whole numbers": (lambda: fit(data=((X > 0).long(), Y)), ModelError, "convert x to floats"),
    "labels as floats": (lambda: fit(net(3), (X, LABELS.float())), DoxaError, "categorical"),
    "labels as words": (
        lambda: fit(net(3), (X, np.array(["a", "b"] * 10))), DataError, "y holds <U1.*numbers",
    ),
    "x of words": (lambda: fit(data=(X.numpy().astype(str), Y)), DataError, "x holds <U.*numbers"),
    "x of objects": (lambda: fit(data=(noisy_object(), Y)), DataError, "x holds object.*numbers"),
    "x complex": (lambda: fit(data=(X.to(torch.complex64), Y)), DataError, "real and imaginary"),
    "x ragged": (lambda: fit(data=([[1.0, 2.0, 3.0], [1.0]] * 10, Y)), DataError, "x is not a table"),
    "x of scipy, sparse": (
        lambda: fit(data=(scipy.sparse.csr_matrix(X.numpy()), Y)), DataError, r"x\.toarray\(\)",
    ),
    "x of torch, sparse": (lambda: fit(data=(X.to_sparse(), Y)), DataError, r"x\.to_dense\(\)"),
    "x with NaN": (lambda: fit(data=(without(nan), Y)), DataError, "nan at row 7, column 2; remove"),
    "x with inf": (lambda: fit(data=(without(inf), Y)), DataError, "inf at row 7, column 2; remove"),
    "y with NaN": (lambda: fit(data=(X, without(nan, of=Y[:, 0]))), DataError, "y is nan at row 7;"),
    "a frame with NaN": (
        lambda: fit(data=(FRAME.where(FRAME != FRAME.iloc[4, 1]), Y)), DataError,
        r"x is nan at row 4 \(index 'p4'\), column 'height'",
    ),
    "a frame with words": (
        lambda: fit(data=(FRAME.assign(age="old", height="tall"), Y)), DataError, "'age'.*'height'.*encode",
    ),
    "a frame with a column twice": (
        lambda: fit(data=(FRAME.set_axis(["age", "age", "weight"], axis=1), Y)), DataError,
        "several columns called 'age'",
    ),
    "weights with NaN": (
        lambda: fit(sample_weight=without(nan, of=torch.ones(N))), DataError, "sample_weight is nan at row 7",
    ),
    "negative weights": (lambda: fit(sample_weight=-torch.ones(N)), DataError, "-1.0 at row 0"),
    "too few weights": (lambda: fit(sample_weight=torch.ones(N - 1)), ShapeError, r"\(19,\), expected \(20,\)"),
    "a label too large": (
        lambda: fit(net(3), (X, LABELS + 1), likelihood="categorical"), DataError, "row 2 .*it is 3",
    ),
    "a negative label": (
        lambda: fit(net(3), (X, LABELS - 1), likelihood="categorical"), DataError, "row 0 .*it is -1",
    ),
    "one class": (
        lambda: fit(net(3), (X, LABELS * 0), likelihood="categorical"), DataError, "one class only",
    ),
    "no rows": (lambda: fit(data=(X[:0], Y[:0])), DataError, "N = 0"),
    "counts below zero": (lambda: fit(data=(X, -LABELS), likelihood="poisson"), DataError, "row 1"),
    "an endless dataset": (lambda: fit(data=loader(Endless())), DataError, "map-style Dataset"),
    "an empty dataset": (lambda: fit(data=TensorDataset(X[:0], Y[:0])), DataError, "N = 0"),
    "a dataset without y": (lambda: fit(data=TensorDataset(X)), DataError, r"pairs \(x, y\)"),
}  # fmt: skip

METHODS: dict[str, Row] = {
    "a name misspelt": (lambda: fit(method="deep-ensembel"), MethodError, "did you mean 'deep-ensemble'"),
    "a name that nothing has": (lambda: fit(method="quantum"), MethodError, "known: .*map"),
    "a number": (lambda: fit(method=3), MethodError, "a name or a method object, not 3"),
    "another class": (lambda: fit(method=dict), MethodError, "a name or a method object"),
    "nothing": (lambda: fit(method=None), MethodError, "a name or a method object, not None"),
    "a setting misspelt": (lambda: doxa.HMC(drwas=1), UnknownSetting, "HMC has no setting 'drwas'.*'draws'"),
    "a setting of fit": (
        lambda: doxa.MAP(lr=0.1), UnknownSetting, r"MAP has no setting 'lr'.*doxa.fit\(\.\.\., lr=0\.1\)",
    ),
    "a setting of the method": (
        lambda: fit(method="hmc", draws=10), UnknownSetting, r"no keyword 'draws'.*doxa\.HMC\(draws=10\)",
    ),
    "a keyword misspelt": (lambda: fit(epoch=3), UnknownSetting, "no keyword 'epoch'.*'epochs'"),
    "a keyword of sample": (
        lambda: doxa.sample(lambda p: -p["a"] ** 2, {"a": 0.0}, "hmc", leapfrog=3), UnknownSetting,
        r"doxa\.HMC\(leapfrog=3\)",
    ),
    "too many settings": (lambda: doxa.MAP(*range(99)), UnknownSetting, "MAP has .* name them"),
    "draws as a word": (lambda: doxa.HMC(draws="many"), MethodError, "draws must be a whole number"),
    "no draws": (lambda: doxa.HMC(draws=0), MethodError, "draws must be .* at least 1"),
    "half a draw": (lambda: doxa.HMC(draws=2.5), MethodError, "draws must be a whole number"),
    "a share above one": (lambda: doxa.HMC(target_accept=1.5), MethodError, "target_accept must be"),
    "NaN": (lambda: doxa.MeanField(temperature=nan), MethodError, "temperature must be.*finite"),
    "a flag as a word": (lambda: doxa.GP(ard="yes"), MethodError, "ard must be True or False"),
    "a choice that is none": (lambda: doxa.Laplace(structure="ful"), MethodError, "structure must be one of"),
    "classes by regression": (
        lambda: doxa.fit(None, (X, LABELS), "linear", likelihood="categorical"), MethodError,
        "regression with Gaussian noise, not categorical",
    ),
    "no network": (lambda: doxa.fit(None, (X, Y), "map"), ModelError, "map needs a network"),
    "a network for gp": (lambda: fit(method="gp"), ModelError, "would not use the network: pass None"),
    "features twice": (
        lambda: fit(method=doxa.BayesianLinear(features="rbf")), MethodError, "features and a network",
    ),
}  # fmt: skip

SETTINGS: dict[str, Row] = {
    "validation above one": (lambda: fit(validation=1.5), DataError, "validation=1.5"),
    "validation in words": (lambda: fit(validation="some"), MethodError, "validation must be"),
    "validation of other columns": (lambda: fit(validation=(X[:, :2], Y)), ShapeError, "validation x"),
    "validation frame of other columns": (
        lambda: fit(data=(FRAME, Y), validation=(FRAME.rename(columns={"age": "alter"}), Y)), DataError,
        "validation x lacks the columns 'age' and has 'alter'",
    ),
    "validation with NaN": (lambda: fit(validation=(without(nan), Y)), DataError, "validation x is nan at row 7"),
    "no members": (lambda: fit(members=0), MethodError, "members must be"),
    "members twice": (lambda: fit(members=[1, 1]), MethodError, "distinct"),
    "no steps": (lambda: fit(steps=0), MethodError, "steps must be"),
    "steps and epochs": (lambda: fit(steps=1, epochs=1), MethodError, "not both"),
    "epochs in words": (lambda: fit(epochs="ten"), MethodError, "epochs must be"),
    "a rate below zero": (lambda: fit(lr=-1), MethodError, "lr must be a positive number"),
    "a batch of nothing": (lambda: fit(batch_size=0), MethodError, "batch_size must be"),
    "a schedule that is none": (lambda: fit(schedule="step"), MethodError, "schedule.*cosine"),
    "a schedule that gives nothing": (lambda: fit(schedule=lambda s: None), MethodError, "schedule"),
    "an optimiser that is none": (lambda: fit(optimizer="adamw2"), MethodError, "optimizer"),
    "an optimiser of torch": (lambda: fit(optimizer=torch.optim.Adam), MethodError, "optimizer"),
    "a device that is none": (lambda: fit(device="gpu"), MethodError, "device 'gpu'"),
    "a device as a float": (lambda: fit(device=0.5), MethodError, "device 0.5"),
    "a type of whole numbers": (lambda: fit(dtype=torch.int32), MethodError, "floating"),
    "a type of numpy": (lambda: fit(dtype=np.float64), MethodError, "floating torch.dtype"),
    "a seed in words": (lambda: fit(seed="lucky"), MethodError, "seed must be a whole number"),
    "a seed of halves": (lambda: fit(seed=0.5), MethodError, "seed must be a whole number"),
    "no seed": (lambda: fit(seed=None), MethodError, "seed must be a whole number"),
    "standardize in words": (lambda: fit(standardize="no"), MethodError, "standardize must be True or False"),
    "patience of nothing": (lambda: fit(patience=0), MethodError, "patience must be"),
    "seconds in words": (
        lambda: fit(checkpoint_every="often"), MethodError, "checkpoint_every must be",
    ),
    "an engine that is none": (lambda: fit(engine="rocket"), MethodError, "'stack' or 'loop'"),
    "a likelihood misspelt": (lambda: fit(likelihood="gausian"), ModelError, "gaussian"),
    "a likelihood of torch": (lambda: fit(likelihood=nn.MSELoss()), ModelError, "likelihood"),
    "a likelihood's class": (lambda: fit(likelihood=doxa.StudentT), ModelError, r"StudentT\(\)"),
    "noise below zero": (lambda: fit(likelihood=doxa.Gaussian(noise=-1)), ModelError, "noise must be positive"),
    "noise in words": (lambda: fit(likelihood=doxa.Gaussian(noise="low")), ModelError, "noise must be positive"),
    "noise of three outputs": (
        lambda: fit(likelihood=doxa.Gaussian(noise=(1.0, 1.0, 1.0))), ModelError, r"\(3,\).*one number",
    ),
    "a prior that matches nothing": (
        lambda: fit(prior={"nowhere.*": doxa.Normal()}), ModelError, "matches no parameter",
    ),
    "a prior of no width": (lambda: fit(prior=doxa.Normal(-1.0)), ModelError, "std"),
    "a prior in words": (lambda: fit(prior=doxa.Normal("wide")), ModelError, "std"),
    "a prior's class": (lambda: fit(prior=doxa.Normal), ModelError, r"Normal\(\)"),
    "a prior that is a number": (lambda: fit(prior=1.0), ModelError, "prior"),
    "a subset of nothing": (lambda: fit(method="mean-field", subset=lambda n: False), ModelError, "no parameter"),
    "a subset misspelt": (lambda: fit(method="laplace", subset="last"), ModelError, "last_layer"),
    "init that is none": (lambda: fit(init="zeros"), MethodError, "'fresh' or 'given'"),
    "init given, another network": (lambda: fit(net(1, 5), init="given"), ModelError, "one row of x"),
    "a callback that is none": (lambda: fit(callbacks=[3]), MethodError, "callbacks.*3"),
    "a callback without a list": (lambda: fit(callbacks=print), MethodError, r"callbacks=\[.*\]"),
    "rows as a number": (lambda: fit(runs=doxa.Runs(rows=[3])), DataError, "a run's rows"),
    "rows out of range": (lambda: fit(runs=doxa.Runs(rows=[[0, 99]])), DataError, "0 … 19"),
    "rows of halves": (lambda: fit(runs=doxa.Runs(rows=[[0.5]])), DataError, "whole numbers"),
    "a mask too short": (
        lambda: fit(runs=doxa.Runs(rows=[[True] * 5])), DataError, "mask.* 5 .*20",
    ),
    "a grid over nothing known": (
        lambda: fit(runs=doxa.Runs(grid={"rate": [1, 2]})), MethodError, "unknown fields.*'rate'.*lr",
    ),
    "a grid of one number": (lambda: fit(runs=doxa.Runs(grid={"lr": 0.1})), MethodError, "lr.*list"),
    "a grid of words": (lambda: fit(runs=doxa.Runs(grid={"lr": ["a"]})), MethodError, "lr"),
    "runs as a dict": (lambda: fit(runs={"lr": [1, 2]}), MethodError, r"doxa\.Runs\("),
    "runs as a number": (lambda: fit(runs=5), MethodError, r"doxa\.Runs\("),
}  # fmt: skip

NETWORKS: dict[str, Row] = {
    "a class": (lambda: fit(nn.Linear), ModelError, "Module.*"),
    "a function": (lambda: fit(lambda x: x), ModelError, "must be a torch.nn.Module"),
    "frozen": (lambda: fit(net().requires_grad_(False)), ModelError, "no trainable parameter"),
    "rows averaged away": (lambda: fit(After(lambda h: h.mean(0))), DoxaError, "first axis must be the rows"),
    "a loss": (lambda: fit(After(torch.sum)), DoxaError, "first axis must be the rows"),
    "two outputs": (lambda: fit(After(lambda h: (h, h))), DoxaError, "likelihood|head|outputs"),
    "rows on another axis": (lambda: fit(After(lambda h: h.T)), DoxaError, "rows"),
    "on the meta device": (lambda: fit(net().to("meta")), DoxaError, "meta"),
    "of halves and doubles": (
        lambda: fit(nn.Sequential(nn.Linear(D, 2), nn.Linear(2, 1).double())), ModelError, "mixed types",
    ),
    "detached": (lambda: fit(After(torch.detach)), ModelError, "no gradient"),
    "an input that is no tensor": (lambda: doxa.nets.mlp("3", 1), ModelError, "inputs"),
    "hidden layers of no width": (lambda: doxa.nets.mlp(3, 1, hidden=(0,)), ModelError, "hidden"),
    "a builder that is none": (lambda: doxa.nets.build("mpl", {}), ModelError, "mlp"),
}  # fmt: skip

PREDICT: dict[str, Row] = {
    "other columns": (lambda: numbers().predict(X[:, :2]), ShapeError, r"\(2,\).*\(3,\)"),
    "a single row": (lambda: numbers().predict(X[0]), ShapeError, r"single row.*x\[:1\]"),
    "words": (lambda: numbers().predict(X.numpy().astype(str)), DataError, "x holds <U"),
    "nothing": (lambda: numbers().predict(None), DataError, "x is None"),
    "NaN": (lambda: numbers().predict(without(nan)), DataError, "x is nan at row 7, column 2"),
    "NaN in a frame": (
        lambda: named().predict(FRAME.where(FRAME != FRAME.iloc[4, 1])), DataError,
        r"row 4 \(index 'p4'\), column 'height'",
    ),
    "NaN after a frame": (lambda: named().predict(without(nan)), DataError, "row 7, column 'weight'"),
    "sparse": (lambda: numbers().predict(scipy.sparse.csr_matrix(X.numpy())), DataError, r"x\.toarray\(\)"),
    "no rows": (lambda: numbers().predict(X[:0]), DataError, "N = 0"),
    "a frame with names amiss": (
        lambda: named().predict(FRAME.rename(columns={"age": "alter", "weight": "mass"})), DataError,
        "lacks the columns 'age', 'weight' and has 'alter', 'mass'",
    ),
    "a frame with a column more": (
        lambda: named().predict(FRAME.assign(shoe=1.0)), DataError, r"has 'shoe'.*x\[posterior\.columns\]",
    ),
    "no samples": (lambda: numbers().predict(X, n=0), MethodError, "n must be"),
    "more samples than kept": (lambda: numbers().predict(X, n=9), MethodError, "9 draws asked for, 2 kept"),
    "a seed in words": (lambda: numbers().predict(X, seed="lucky"), MethodError, "seed must be"),
    "keep everything": (lambda: numbers().predict(X, keep="all"), MethodError, "'samples' or 'moments'"),
    "a loader that shuffles": (lambda: numbers().predict(loader(shuffle=True)), DataError, "shuffle=False"),
    "a loader that drops rows": (
        lambda: numbers().predict(loader(drop_last=True)), DataError, "last 2 rows.*drop_last=False",
    ),
    "a loader that never ends": (lambda: numbers().predict(loader(Endless())), DataError, "never end"),
    "a loader that is longer than it says": (
        lambda: numbers().predict(loader(TooLong())), DataError, "more rows than its length, 20",
    ),
    "a loader of nothing": (
        lambda: numbers().predict(loader(TensorDataset(X[:0]))), DataError, "N = 0",
    ),
    "a loader of three": (
        lambda: numbers().predict(loader(TensorDataset(X, Y, Y))), DataError, "3 parts",
    ),
    "a level of a percentage": (lambda: numbers().predict(X).interval(95), DataError, "between 0 and 1, got 95"),
    "a level in words": (lambda: numbers().predict(X).interval("wide"), DataError, "between 0 and 1"),
    "a quantile above one": (lambda: numbers().predict(X).quantile(1.5), DataError, "between 0 and 1"),
    "a quantile in words": (lambda: numbers().predict(X).quantile("median"), DataError, "between 0 and 1"),
    "probs of numbers": (lambda: numbers().predict(X).probs, Unavailable, "classification; use mean"),
    "votes of numbers": (lambda: numbers().predict(X).votes(), Unavailable, "classification"),
    "an interval of classes": (lambda: classes().predict(X).interval(0.9), Unavailable, "use probs"),
    "samples of moments": (lambda: numbers().predict(X, keep="moments").samples, Unavailable, "no samples"),
    "heads of one": (lambda: numbers().predict(X).heads, Unavailable, "one head"),
    "log_prob of too few": (lambda: numbers().predict(X).log_prob(Y[:3]), ShapeError, "3 targets.*20 rows"),
    "log_prob of another shape": (lambda: numbers().predict(X).log_prob(Y.T), ShapeError, r"\[1, 20\]"),
    "log_prob of nothing": (lambda: numbers().predict(X).log_prob(None), DataError, "y|targets"),
    "log_prob of words": (lambda: numbers().predict(X).log_prob(["a"] * N), DataError, "targets must be numbers"),
    "log_prob of an unseen class": (lambda: classes().predict(X).log_prob(LABELS + 1), DataError, "row 2"),
    "draws of y, none": (lambda: numbers().predict(X).sample(0), DataError, "n must be"),
    "draws of y, in words": (lambda: numbers().predict(X).sample("ten"), DoxaError, "n must be"),
    "weights of a process": (lambda: process().draw(3), Unavailable, "no weights"),
    "features of a process": (lambda: process().features(X), Unavailable, "no network"),
    "chains of an exact model": (lambda: exact().to_arviz(), Unavailable, "no chains"),
    "a network conditioned": (lambda: numbers().condition(X, Y), Unavailable, "fit again"),
    "too many draws": (lambda: chains().draw(99), MethodError, "99 draws asked for, 8 kept"),
    "functions of one row": (lambda: numbers().functions(X[0]), ShapeError, "single row"),
    "a mixture of nothing": (lambda: doxa.MixturePosterior([], []), MethodError, "one nonnegative weight"),
    "probabilities that are none": (
        lambda: doxa.Predictive.from_probs(torch.ones(4, 3)), DataError, "row 0.*no distribution",
    ),
}  # fmt: skip


def density(p: dict[str, Tensor]) -> Tensor:
    return -p["a"].square().sum()


def short() -> Any:
    return doxa.HMC(draws=4, burn_in=2, leapfrog=2)


SAMPLE: dict[str, Row] = {
    "no function": (lambda: doxa.sample(3, {"a": 0.0}, short()), ModelError, "log density|log_density"),
    "a density that is no number": (
        lambda: doxa.sample(lambda p: p["a"].expand(3), {"a": 0.0}, short()), ModelError, "scalar|one number",
    ),
    "a density that is a float": (lambda: doxa.sample(lambda p: 1.0, {"a": 0.0}, short()), ModelError, "tensor"),
    "a density that is NaN": (
        lambda: doxa.sample(lambda p: p["a"] * nan, {"a": 0.0}, short()), NumericalError, "nan",
    ),
    "a density that fails": (lambda: doxa.sample(lambda p: p["b"], {"a": 0.0}, short()), ModelError, "'b'"),
    "no start": (lambda: doxa.sample(density, {}, short()), DoxaError, "init"),
    "a start in words": (lambda: doxa.sample(density, {"a": "zero"}, short()), DoxaError, "init 'a'"),
    "a start outside": (
        lambda: doxa.sample(density, {"a": -1.0}, short(), constraints={"a": "positive"}), DoxaError, "a",
    ),
    "a constraint of nothing": (
        lambda: doxa.sample(density, {"a": 0.0}, short(), constraints={"b": "positive"}), DoxaError, "'b'",
    ),
    "a constraint that is none": (
        lambda: doxa.sample(density, {"a": 0.0}, short(), constraints={"a": "positiv"}), DoxaError, "positive",
    ),
    "a method that cannot": (lambda: doxa.sample(density, {"a": 0.0}, "laplace"), DoxaError, "laplace"),
    "no chains": (lambda: doxa.sample(density, {"a": 0.0}, short(), 0), MethodError, "members must be"),
    "jitter below zero": (lambda: doxa.sample(density, {"a": 0.0}, short(), jitter=-1), DoxaError, "jitter"),
    "a parameter that is none": (lambda: doxa.sample(density, {"a": 0.0}, short())["mu"], DoxaError, "'a'"),
}  # fmt: skip

EVALUATE: dict[str, Row] = {
    "metrics of too few": (lambda: evaluate.metrics(numbers().predict(X), Y[:3]), ShapeError, "3 targets"),
    "metrics of a posterior": (lambda: evaluate.metrics(numbers(), Y), DataError, r"posterior\.predict\(x\)"),
    "metrics of plain numbers": (lambda: evaluate.metrics(Y, Y), DataError, "Predictive"),
    "metrics without y": (lambda: evaluate.metrics(numbers().predict(X), None), DataError, "y|targets"),
    "accuracy of numbers": (lambda: evaluate.accuracy(numbers().predict(X), Y), DoxaError, "class"),
    "ece of numbers": (lambda: evaluate.ece(numbers().predict(X), Y), DoxaError, "class"),
    "brier of numbers": (lambda: evaluate.brier(numbers().predict(X), Y), DoxaError, "class"),
    "rmse of classes": (lambda: evaluate.rmse(classes().predict(X), LABELS), DoxaError, "class|regression"),
    "crps of classes": (lambda: evaluate.crps(classes().predict(X), LABELS), DoxaError, "class"),
    "coverage of a percentage": (lambda: evaluate.coverage(numbers().predict(X), Y, 95), DataError, "between 0 and 1"),
    "bins of nothing": (lambda: evaluate.ece(classes().predict(X), LABELS, bins=0), DoxaError, "bins"),
    "auroc of nothing": (lambda: evaluate.auroc([], [1.0]), DataError, "empty|no score|at least one"),
    "auroc of NaN": (lambda: evaluate.auroc([nan], [1.0]), DataError, "nan|finite|NaN"),
    "a score misspelt": (lambda: evaluate.ood_scores(numbers(), X, scores=["entropi"]), MethodError, "entropy"),
    "conformal on two rows": (lambda: evaluate.conformal(numbers(), (X[:2], Y[:2])), DataError, "at least 9"),
    "conformal of a percentage": (lambda: evaluate.conformal(numbers(), (X, Y), 90), DataError, "between 0 and 1"),
    "conformal without y": (lambda: evaluate.conformal(numbers(), X), DataError, r"a pair \(x, y\)"),
    "conformal misspelt": (lambda: evaluate.conformal(numbers(), (X, Y), kind="splitt"), MethodError, "split"),
    "recalibrate for classes": (lambda: evaluate.recalibrate(numbers(), (X, Y)), MethodError, "quantile, variance"),
    "recalibrate misspelt": (
        lambda: evaluate.recalibrate(classes(), (X, LABELS), "temprature"), MethodError, "temperature",
    ),
    "an option misspelt": (
        lambda: evaluate.recalibrate(classes(), (X, LABELS), "histogram", bin=3), MethodError, "bins",
    ),
    "the doctor without data": (lambda: doctor(numbers(), None), DataError, r"pair \(x, y\)"),
    "the doctor of a sweep": (
        lambda: doctor(fit(runs=doxa.Runs(seeds=[0, 1])), (X, Y)), DoxaError, r"sweep\[",
    ),
    "select without validation": (
        lambda: fit(runs=doxa.Runs(seeds=[0, 1])).select(), Unavailable, r"validation=0\.2",
    ),
    "select by nothing known": (
        lambda: fit(runs=doxa.Runs(seeds=[0, 1])).select(by="rmse"), MethodError, "'validation'",
    ),
}  # fmt: skip

TABLES = {
    "data": DATA, "method": METHODS, "settings": SETTINGS, "network": NETWORKS,
    "predict": PREDICT, "sample": SAMPLE, "evaluate": EVALUATE,
}  # fmt: skip
ROWS = [pytest.param(*row, id=f"{of}: {name}") for of, t in TABLES.items() for name, row in t.items()]


@pytest.mark.parametrize("mistake, error, words", ROWS)
def test_a_mistake_is_named(mistake: Callable[[], Any], error: type[DoxaError], words: str) -> None:
    with pytest.raises(error, match=rf"(?s){words}"):
        mistake()
