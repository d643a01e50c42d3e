"""What both estimators are: the arguments of `doxa.fit`, stored, and a posterior to ask."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from doxa import checks, likelihoods, nets
from doxa.errors import MemoryBudgetError, MethodError, ModelError
from doxa.fit import fit
from doxa.likelihoods import Heads, Likelihood
from doxa.method import Method, as_method
from doxa.model import Subset
from doxa.predictive import Predictive
from doxa.sklearn import inputs, saving
from doxa.sklearn.counting import counted
from doxa.sklearn.inputs import Array
from doxa.sklearn.network import Builder, made

_TYPES: dict[Any, Any] = {"float64": torch.float64, "float32": torch.float32}


class BayesianEstimator(BaseEstimator):
    """A network with a posterior, as a scikit-learn estimator.

    Attributes
    ----------
    posterior_: what `doxa.fit` gave: status, diagnostics, `predict`, `functions`, `save`.
    n_features_in_, feature_names_in_: how many columns, and their names if X had any.
    """

    def __init__(
        self,
        method: str | Method | type[Method] = "deep-ensemble",
        *,
        net: nn.Module | Builder | None = None,
        hidden: Sequence[int] = (50,),
        likelihood: str | Likelihood | None = None,
        prior: Any = None,
        subset: Subset | None = None,
        members: int | Sequence[int] | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        schedule: Any = "cosine",
        optimizer: Any = "adam",
        validation: str | float | None = "auto",
        patience: int = 20,
        init: str = "fresh",
        standardize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = "float64",
        random_state: int | np.random.RandomState | None = 0,
        progress: bool | None = False,
        column_order: str = "fixed",
    ) -> None:
        """Store the settings; nothing is checked before `fit`.

        What is not explained is as in `doxa.fit`. The defaults are the same, but for `standardize`
        (as in the shell) and `dtype` (double precision, as everywhere in scikit-learn).

        Parameters
        ----------
        method: a name (see `doxa.methods()`) or a method object with its settings.
        net: an `nn.Module`, or a builder called as net(inputs, outputs); None: an MLP.
        hidden: widths of that MLP's layers.
        likelihood: by name or as an object; None: see the estimator.
        members, epochs, steps, lr, batch_size: None leaves them to the method.
        validation: "auto": methods that can overfit hold rows out, each member others; None: every
            row is trained on; a number: that share of the rows.
        standardize: scale columns of X, and y where it is continuous.
        dtype: "float64" or "float32" ("float32" gives the bits of a plain `doxa.fit`); None: the
            network's own.
        random_state: the seed of `doxa.fit`, a `RandomState` that one is drawn from, or None for
            another one at each fit.
        column_order: "fixed": columns of a DataFrame in another order than at `fit` are an error,
            as in all of scikit-learn; "any": they are put in order by name.
        """
        self.method = method
        self.net = net
        self.hidden = hidden
        self.likelihood = likelihood
        self.prior = prior
        self.subset = subset
        self.members = members
        self.epochs = epochs
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.schedule = schedule
        self.optimizer = optimizer
        self.validation = validation
        self.patience = patience
        self.init = init
        self.standardize = standardize
        self.device = device
        self.dtype = dtype
        self.random_state = random_state
        self.progress = progress
        self.column_order = column_order

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to rows X [N, D] and targets y; sample_weight: one a row. A row of weight 2 is the
        row twice, to the bit, and one of weight 0 is no row: see `doxa.sklearn.counting`."""
        self._check_settings()
        X, y = self._read(*inputs.without_zeros(X, y, sample_weight))
        weight = inputs.row_weights(sample_weight, len(X))
        targets = self._learn_targets(y, weight)
        method = as_method(self.method)
        likelihood, self._outputs = self._meaning(X)
        likelihood.prepare_targets(
            targets, (self._outputs,)
        )  # an error names the row as it is here
        X, targets, weight = counted(X, targets, weight)
        self.posterior_ = fit(
            self._network(method), (X, targets), method, likelihood=likelihood, prior=self.prior,
            subset=self.subset, members=self.members, seed=self._seed(), init=self.init,
            validation=self.validation, patience=self.patience, standardize=self.standardize,
            sample_weight=weight, device=self.device, dtype=_TYPES.get(self.dtype, self.dtype),
            batch_size=self.batch_size, steps=self.steps, epochs=self.epochs, lr=self.lr,
            schedule=self.schedule, optimizer=self.optimizer, progress=self.progress,
        )  # fmt: skip
        return self

    def predictive(self, X: Any) -> Predictive:
        """All that is believed of y at X: `aleatoric`, `epistemic`, `quantile`, `log_prob`…"""
        X = self._new(X)
        return self.posterior_.predict(X)

    def log_likelihood(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The mean log predictive density of y: what to search by where doubt matters."""
        p = self.predictive(X)
        each = p.log_prob(self._known_targets(y)).cpu().double().numpy()
        return float(np.average(each, weights=inputs.row_weights(sample_weight, len(each))))

    def save(self, path: str | Path) -> None:
        """Write posterior and settings as safetensors and JSON; `load` and `doxa.load` read it."""
        check_is_fitted(self)
        saving.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        net: nn.Module | Builder | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """What `save` wrote; `net` where the network was not made by a registered builder."""
        return saving.load(cls, path, net, device)

    def __getstate__(self) -> dict[str, Any]:
        return saving.to_state(super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        saving.from_state(self)

    @abstractmethod
    def _read(self, X: Any, y: Any) -> tuple[Array, Array]:
        """X and y as checked arrays."""

    @abstractmethod
    def _learn_targets(self, y: Array, weight: Array | None) -> Array:
        """y as `doxa.fit` takes it; what it looks like is remembered."""

    @abstractmethod
    def _known_targets(self, y: Any) -> Array:
        """y as `doxa.fit` takes it, after a fit."""

    @abstractmethod
    def _meaning(self, X: Array) -> tuple[Likelihood, int]:
        """The likelihood, and how many outputs it needs of the network."""

    def _likelihood(self, default: str) -> Likelihood:
        asked = self.likelihood
        meant = likelihoods.assumed(default) if asked is None else likelihoods.likelihood(asked)
        if isinstance(meant, Heads):
            raise ModelError(
                f"{type(self).__name__} takes one likelihood, not a tuple; several heads are for "
                "doxa.fit"
            )
        return meant

    def _network(self, method: Method) -> nn.Module | None:
        """The network that is asked for, or None for a method that brings its own functions."""
        if self.net is None:
            if not method.needs_network:
                return None
            return nets.mlp(self.n_features_in_, self._outputs, self._widths())
        return made(self.net, self.n_features_in_, self._outputs)

    def _widths(self) -> list[int]:
        if isinstance(self.hidden, str) or not isinstance(self.hidden, Iterable):
            raise MethodError(f"hidden is a list of widths, such as (50, 50), not {self.hidden!r}")
        return [checks.whole("a width in hidden", width) for width in self.hidden]

    def _check_settings(self) -> None:
        share = isinstance(self.validation, Real)
        if self.validation is not None and self.validation != "auto" and not share:
            raise MethodError(
                f"validation is 'auto', None or a share of the rows, not {self.validation!r}; "
                "rows of your own are for doxa.fit"
            )
        if self.column_order not in ("fixed", "any"):
            raise MethodError(f"column_order is 'fixed' or 'any', not {self.column_order!r}")

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _new(self, X: Any) -> Array:
        check_is_fitted(self)
        return inputs.new_rows(self, X, any_order=self.column_order == "any")

    def _summary(self, X: Any) -> Predictive:
        """For means and variances: streamed where samples do not fit in memory."""
        X = self._new(X)
        try:
            return self.posterior_.predict(X)
        except MemoryBudgetError:
            return self.posterior_.predict(X, keep="moments")


def as_numbers(values: Tensor) -> Array:
    """In double precision, as scikit-learn's own estimators answer."""
    return values.detach().cpu().double().numpy()
