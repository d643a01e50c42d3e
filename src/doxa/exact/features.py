"""Features φ(x) of linear models: the inputs, or functions of them.

    polynomial   all monomials of the inputs up to a total degree
    rbf          φ_j(x) = exp(−‖x − c_j‖² / 2ℓ²), centres c_j drawn from the training rows
    fourier      φ_j(x) = √(2/m) cos(ω_jᵀx + b_j), ω ~ N(0, ℓ⁻²), b ~ U(0, 2π): as m grows, φᵀφ' is
                 the squared-exponential kernel (Rahimi & Recht, 2007)

A function of the user, or the last hidden layer of a network, may give the features too. All are
computed in float64. The intercept is a feature that is always 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.errors import DataError, MethodError
from doxa.linalg.layout import Params
from doxa.method import Run
from doxa.model import Model
from doxa.noise import generator

MOST_MONOMIALS = 5000  # largest number of features, whose covariance is a dense matrix


@dataclass(frozen=True)
class Basis:
    """A kind of features. A call computes φ(x); its argument `tensors` has the centres or
    frequencies, if this kind needs them.

    Parameters
    ----------
    kind : str
        "inputs", "polynomial", "rbf", "fourier", or "function" for a callable or a network.
    degree : int
        The degree of a polynomial.
    intercept : bool
        Whether a feature that is always 1 is added.
    """

    kind: str
    degree: int = 1
    intercept: bool = True

    def __call__(
        self,
        x: Any,
        tensors: Params,
        function: Callable[[Any], Tensor] | None = None,
        lead: int = 0,
    ) -> Tensor:
        """The features of inputs x.

        Parameters
        ----------
        x : Tensor, tuple or dict
            Inputs [N, ...], or [M, N, ...] with a member axis.
        tensors : dict of str to Tensor
            Centres or frequencies per member, from `random_features`.
        function : callable, optional
            The function of the kind "function".
        lead : int
            1 if x has a member axis, else 0.

        Returns
        -------
        Tensor
            φ [N, F], or [M, N, F] if x or `tensors` have a member axis.
        """
        if self.kind == "function":
            assert function is not None
            phi = _call(function, x, lead)
        else:
            phi = self._own(_matrix(x, lead), tensors)
        if self.intercept:
            phi = torch.cat([phi, phi.new_ones(*phi.shape[:-1], 1)], -1)
        return phi

    def _own(self, x: Tensor, tensors: Params) -> Tensor:
        if self.kind == "inputs":
            return x
        if self.kind == "polynomial":
            powers = monomials(x.shape[-1], self.degree)
            columns = [torch.stack([x[..., i] for i in p], -1).prod(-1) for p in powers]
            return torch.stack(columns, -1) if columns else x[..., :0]
        if self.kind == "rbf":
            scale = tensors["lengthscale"][:, None, None]
            away = torch.cdist(x.expand(len(scale), -1, -1) / scale, tensors["centres"] / scale)
            return (-0.5 * away.square()).exp()
        angle = x @ tensors["frequencies"].mT + tensors["phases"].unsqueeze(-2)
        return math.sqrt(2.0 / angle.shape[-1]) * angle.cos()


def network_features(basis: Basis, net: Model, theta: Tensor, x: Any, lead: int = 0) -> Tensor:
    """The features of a basis whose function is a network without its last layer.

    Parameters
    ----------
    basis : Basis
        The basis, of kind "function".
    net : Model
        The network.
    theta : Tensor of shape [K, P]
        Its weights.
    x : Tensor, tuple or dict
        The inputs.
    lead : int
        1 if x has a member axis, else 0.

    Returns
    -------
    Tensor
        φ [K, N, F]. It has no member axis if all members have the same weights and x has none.
    """

    def of(row: Tensor) -> Callable[[Any], Tensor]:
        params = net.layout.unflatten(row)
        return lambda x: net.features(params, x).flatten(1)

    if bool((theta == theta[0]).all()):
        return basis(x, {}, of(theta[0]), lead)
    own = lambda k: tree_map(lambda t: t[k], x) if lead else x  # noqa: E731
    return torch.stack([basis(own(k), {}, of(row)) for k, row in enumerate(theta)])


def monomials(inputs: int, degree: int) -> list[tuple[int, ...]]:
    """The products of 1 to `degree` inputs, each as the tuple of the indices of its inputs."""
    if math.comb(inputs + degree, degree) > MOST_MONOMIALS:
        raise MethodError(
            f"{inputs} inputs have {math.comb(inputs + degree, degree)} monomials up to degree "
            f"{degree}, more than {MOST_MONOMIALS}; lower the degree"
        )
    products = itertools.combinations_with_replacement
    return [p for d in range(1, degree + 1) for p in products(range(inputs), d)]


def random_features(basis: Basis, run: Run, count: int, lengthscale: Tensor) -> Params:
    """The random centres or frequencies of each member, [M, count, D]. They are drawn with the
    member's seed, and centres from the member's rows. Empty for other kinds of features."""
    if basis.kind not in ("rbf", "fourier"):
        return {}
    inputs = _matrix(run.rows.take(run.rows.rows[0][:1])[0]).shape[-1]
    lengthscale = lengthscale.double()
    if basis.kind == "fourier":
        noise = run.noise("features")
        waves = noise.normal((count, inputs)).double() / lengthscale[:, None, None]
        phases = 2 * math.pi * noise.uniform((count,), 1).double()
        return {"frequencies": waves, "phases": phases}
    count = min(count, *(len(rows) for rows in run.rows.rows))
    centres = []
    for r, split, seed, member in zip(
        run.run_of, run.split_of, run.seeds, run.members, strict=True
    ):
        rows = run.rows.rows[split]
        g = generator("centres", seed, member)
        chosen = rows[torch.randperm(len(rows), generator=g)[:count].sort().values]
        centres.append(_matrix(run.rows.take(chosen, torch.tensor(r))[0]))
    return {"centres": torch.stack(centres), "lengthscale": lengthscale}


def _matrix(x: Any, lead: int = 0) -> Tensor:
    if not isinstance(x, Tensor):
        raise DataError("this basis needs x as one array [N, D]; give a callable for other inputs")
    return x.double().reshape(*x.shape[: lead + 1], -1)


def _call(function: Callable[[Any], Tensor], x: Any, lead: int) -> Tensor:
    """Call the user's function. A member axis of x is merged with the axis of rows for the call."""
    shape = tree_flatten(x)[0][0].shape[: lead + 1]
    flat = tree_map(lambda t: t.flatten(0, 1), x) if lead else x
    with torch.no_grad():
        phi = function(flat)
    if not isinstance(phi, Tensor) or phi.ndim < 2 or len(phi) != math.prod(shape):
        raise MethodError("features must return a tensor [N, F] for inputs [N, ...]")
    return phi.detach().double().reshape(*shape, -1)
