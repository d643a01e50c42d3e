"""doxa: any PyTorch network, made Bayesian.

posterior = doxa.fit(net, (x, y), "deep-ensemble")
p = posterior.predict(x_new)
p.mean, p.aleatoric, p.epistemic
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from doxa import errors, nets
from doxa.density import Draws, sample, transforms, transitions
from doxa.driver.runs import Runs, Sweep
from doxa.driver.watch import Snapshot, Snapshots
from doxa.engine import Engine
from doxa.fit import Checkpoint, Compute, Training, fit
from doxa.likelihoods import (
    Bernoulli,
    Categorical,
    Counts,
    Gaussian,
    HeteroscedasticGaussian,
    LaplaceNoise,
    NegativeBinomial,
    Poisson,
    StudentT,
)  # fmt: skip
from doxa.method import Method
from doxa.model import Model
from doxa.plan import FitPlan, blocks, plan
from doxa.posterior import MixturePosterior, Posterior, load, prior_scales
from doxa.predictive import Predictive
from doxa.priors import (
    FanInNormal,
    FlowPrior,
    Hierarchical,
    LaplacePrior,
    Normal,
    ScaleMixture,
    StudentTPrior,
)  # fmt: skip
from doxa.priors.functions import GPPrior, HierarchicalGP, ImplicitPrior
from doxa.registry import ROWS, get_method, methods
from doxa.store import join

if TYPE_CHECKING:  # what type checkers know in full; a method that is not here is Any to them
    from doxa import decide, diagnose, evaluate, selection, tables, text
    from doxa import sklearn as sklearn
    from doxa.ensemble.deep import DeepEnsemble as DeepEnsemble
    from doxa.ensemble.map import MAP as MAP
    from doxa.exact.linear import BayesianLinear as BayesianLinear
    from doxa.function.functional_prior import FunctionalPrior as FunctionalPrior
    from doxa.function.functional_prior import functional_prior
    from doxa.function.gp import GP as GP
    from doxa.laplace.laplace import Laplace as Laplace
    from doxa.mcmc.constant_sgd import ConstantSGD as ConstantSGD
    from doxa.mcmc.cyclical import CyclicalSGMCMC as CyclicalSGMCMC
    from doxa.mcmc.hmc import HMC as HMC
    from doxa.mcmc.mala import MALA as MALA
    from doxa.mcmc.metropolis import Metropolis as Metropolis
    from doxa.mcmc.minibatch_mh import MinibatchMH as MinibatchMH
    from doxa.mcmc.nuts import NUTS as NUTS
    from doxa.mcmc.psgld import PSGLD as PSGLD
    from doxa.mcmc.sghmc import SGHMC as SGHMC
    from doxa.mcmc.sgld import SGLD as SGLD
    from doxa.selection import evidence, tune
    from doxa.tables import Table, read_table
    from doxa.tabular import fit_table, predict_table
    from doxa.vi.mc_dropout import MCDropout as MCDropout
    from doxa.vi.mean_field import MeanField as MeanField

__version__ = "0.1.0"

__all__ = [
    "Bernoulli", "Categorical", "Checkpoint", "Compute", "Counts", "Draws", "Engine",
    "FanInNormal", "FitPlan", "FlowPrior", "GPPrior", "Gaussian", "HeteroscedasticGaussian",
    "Hierarchical", "HierarchicalGP", "ImplicitPrior", "LaplaceNoise", "LaplacePrior", "Method",
    "MixturePosterior", "Model", "NegativeBinomial", "Normal", "Poisson", "Posterior",
    "Predictive", "Runs", "ScaleMixture", "Snapshot", "Snapshots", "StudentT", "StudentTPrior",
    "Sweep", "Table", "Training", "blocks", "decide", "diagnose", "errors", "evaluate",
    "evidence", "fit", "fit_table", "functional_prior", "get_method", "join", "load", "methods",
    "nets", "plan", "predict_table", "prior_scales", "read_table", "sample", "selection",
    "tables", "text", "transforms", "transitions", "tune",
]  # fmt: skip
__all__ += [row.class_name for row in ROWS]  # the methods themselves


def __getattr__(name: str) -> Any:
    """Method classes, and what consumes a posterior, are imported when first used."""
    if name == "functional_prior":
        return importlib.import_module("doxa.function.functional_prior").functional_prior
    if name in ("evidence", "tune"):
        return getattr(importlib.import_module("doxa.selection"), name)
    if name in ("fit_table", "predict_table"):
        return getattr(importlib.import_module("doxa.tabular"), name)
    if name in ("Table", "read_table"):
        return getattr(importlib.import_module("doxa.tables"), name)
    if name in ("decide", "diagnose", "evaluate", "selection", "sklearn", "tables", "text"):
        return importlib.import_module(f"doxa.{name}")
    for row in methods():
        if row.class_name == name:
            return get_method(row.name)
    raise AttributeError(f"module 'doxa' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__", "data", "sklearn"])
