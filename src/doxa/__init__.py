"""doxa: any PyTorch network, made Bayesian.

posterior = doxa.fit(net, (x, y), "deep-ensemble")
p = posterior.predict(x_new)
p.mean, p.aleatoric, p.epistemic
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public names, by the module that defines them. A name is imported when it is first used:
# `import doxa` imports nothing, not even torch, so that `doxa --help` answers at once.
_HOMES = {
    "doxa.density": "Draws sample transforms transitions",
    "doxa.driver.runs": "Runs Sweep",
    "doxa.driver.watch": "Snapshot Snapshots",
    "doxa.engine": "Engine",
    "doxa.fit": "Checkpoint Compute Training fit",
    "doxa.function.functional_prior": "functional_prior",
    "doxa.likelihoods": "Bernoulli Categorical Counts Gaussian "
    "HeteroscedasticGaussian LaplaceNoise NegativeBinomial Poisson StudentT",
    "doxa.method": "Method",
    "doxa.model": "Model",
    "doxa.plan": "FitPlan blocks plan",
    "doxa.posterior": "MixturePosterior Posterior load prior_scales",
    "doxa.predictive": "Predictive",
    "doxa.priors": "FanInNormal FlowPrior Hierarchical "
    "LaplacePrior Normal ScaleMixture StudentTPrior",
    "doxa.priors.functions": "GPPrior HierarchicalGP ImplicitPrior",
    "doxa.registry": "get_method methods",
    "doxa.selection": "evidence tune",
    "doxa.store": "join",
    "doxa.tables": "Table read_table",
    "doxa.tabular": "fit_table predict_table",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
_PARTS = (
    "decide", "diagnose", "errors", "evaluate", "nets", "plot", "selection", "sklearn",
    "tables", "text",
)  # fmt: skip

if TYPE_CHECKING:  # for type checkers; a method that is not here is Any to them
    from doxa import decide, diagnose, errors, evaluate, nets, plot, selection, tables, text
    from doxa import sklearn as sklearn
    from doxa.density import transforms
    from doxa.density.draws import Draws
    from doxa.density.sample import sample
    from doxa.density.transitions import transitions
    from doxa.driver.runs import Runs, Sweep
    from doxa.driver.watch import Snapshot, Snapshots
    from doxa.engine import Engine
    from doxa.ensemble.deep import DeepEnsemble as DeepEnsemble
    from doxa.ensemble.map import MAP as MAP
    from doxa.exact.linear import BayesianLinear as BayesianLinear
    from doxa.fit import Checkpoint, Compute, Training, fit
    from doxa.function.functional_prior import FunctionalPrior as FunctionalPrior
    from doxa.function.functional_prior import functional_prior
    from doxa.function.gp import GP as GP
    from doxa.laplace.laplace import Laplace as Laplace
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
    )
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
    )
    from doxa.priors.functions import GPPrior, HierarchicalGP, ImplicitPrior
    from doxa.registry import get_method, methods
    from doxa.selection import evidence, tune
    from doxa.store import join
    from doxa.tables import Table, read_table
    from doxa.tabular import fit_table, predict_table
    from doxa.vi.mc_dropout import MCDropout as MCDropout
    from doxa.vi.mean_field import MeanField as MeanField

    __all__ = [
        "Bernoulli",
        "Categorical",
        "Checkpoint",
        "Compute",
        "Counts",
        "Draws",
        "Engine",
        "FanInNormal",
        "FitPlan",
        "FlowPrior",
        "GPPrior",
        "Gaussian",
        "HeteroscedasticGaussian",
        "Hierarchical",
        "HierarchicalGP",
        "ImplicitPrior",
        "LaplaceNoise",
        "LaplacePrior",
        "Method",
        "MixturePosterior",
        "Model",
        "NegativeBinomial",
        "Normal",
        "Poisson",
        "Posterior",
        "Predictive",
        "Runs",
        "ScaleMixture",
        "Snapshot",
        "Snapshots",
        "StudentT",
        "StudentTPrior",
        "Sweep",
        "Table",
        "Training",
        "blocks",
        "decide",
        "diagnose",
        "errors",
        "evaluate",
        "evidence",
        "fit",
        "fit_table",
        "functional_prior",
        "get_method",
        "join",
        "load",
        "methods",
        "nets",
        "plan",
        "plot",
        "predict_table",
        "prior_scales",
        "read_table",
        "sample",
        "selection",
        "tables",
        "text",
        "transforms",
        "transitions",
        "tune",
    ]


class _FrontPage(ModuleType):
    """Two functions have the names of their modules, `fit` and `plan`: the package shows the
    functions, whichever is imported first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontPage


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used."""
    if name in _PARTS:
        return importlib.import_module(f"doxa.{name}")
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'doxa' has no attribute {name!r}")
    registry = importlib.import_module("doxa.registry")
    if name == "__all__":
        public = {*_HOME, *_PARTS} - {"sklearn"}  # an extra
        return [*sorted(public), *(row.class_name for row in registry.ROWS)]
    if name in _HOME:
        found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return found
    for row in registry.methods():
        if row.class_name == name:
            return registry.get_method(row.name)
    if not name.startswith("_") and importlib.util.find_spec(f"doxa.{name}") is not None:
        return importlib.import_module(f"doxa.{name}")  # a module, as after any other import
    raise AttributeError(f"module 'doxa' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__getattr__("__all__"), "__version__", "data", "sklearn"])
