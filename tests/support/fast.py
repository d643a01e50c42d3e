"""What the contract tests ask of each method: a single step, a hopeless run, a grid of its own.

All of it follows from the method's row and its fields, so that a new method needs no entry here.
`SPECIAL` has what cannot be guessed, and is laid over it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from short import short_settings

import doxa
from doxa.errors import MethodError
from doxa.registry import Row

Settings = dict[str, Any]


@dataclass(frozen=True)
class Fast:
    """Settings of a method for a small machine; what is empty leaves `settings` as they are."""

    settings: Settings
    one_step: Settings
    many_steps: Settings  # where engines are compared
    hopeless: Settings
    changed: Settings  # settings that are not the defaults
    grid: dict[str, list[Any]]
    hopeless_options: Settings = field(default_factory=dict)  # of `fit`
    rounding: float = 1e-8  # of float64, grown by a fit: a burn-in that adapts is chaotic


# Settings are laid over those that are derived; a grid replaces the derived one.
SPECIAL: dict[str, dict[str, Any]] = {
    "gp": {"rounding": 1e-6},  # repeated rows have no noise: B's condition is that of its bound
    "mc-dropout": {"changed": {"p": 0.2, "insert": "all"}, "grid": {"p": [0.05, 0.3]}},
    "mean-field": {"grid": {"initial_std": [0.02, 0.1]}},
    "snapshot": {"one_step": {"snapshots": 1}},
    "swag": {"changed": {"rank": 3}},
    "laplace": {"changed": {"structure": "kronecker", "tuned_scale": "layer"}},
    "hmc": {
        "one_step": {"leapfrog": 2},
        "many_steps": {"leapfrog": 2},
        "hopeless": {"leapfrog": 1},
        "rounding": 1e-6,
    },
    "nuts": {"hopeless": {"max_depth": 1}, "changed": {"mass": "full"}, "rounding": 1e-4},
    "metropolis": {
        "one_step": {"scale": 0.05},
        "many_steps": {"scale": 0.05},
        "hopeless": {"scale": 100.0},
        "changed": {"covariance": "diagonal"},
    },
    "sghmc": {"changed": {"gradient_noise": 0.01}, "grid": {"step_size": [1e-4, 2e-4]}},
    "psgld": {
        "one_step": {"correction": "none"},
        "many_steps": {"burn_in": 20},  # its end freezes the preconditioner
        "hopeless": {"burn_in": 20},
        "changed": {"correction": "gamma"},
    },
    "cyclical": {
        "one_step": {"cycles": 1, "exploration": 0.0},
        "many_steps": {"draws": 10},
        "changed": {"inner": "sghmc"},
    },
    "constant-sgd": {
        "rounding": 1e-6,  # its rate lies near the edge where errors grow
        "one_step": {"probes": 2},
        "many_steps": {"burn_in": 10, "step_size": 0.01},
        "hopeless": {"step_size": 1e6},
        "changed": {"step_size": 0.1},
        "grid": {"step_size": [0.01, 0.03]},
    },
    # Their evidence is maximised by line searches; on a GPU many runs are factorised in one call.
    "nngp": {"hopeless": {"refine": 1}, "rounding": 1e-5},
    "ntk": {"hopeless": {"refine": 1}, "rounding": 1e-5},
    "minibatch-mh": {
        "one_step": {"step_size": 1e-4},
        "many_steps": {"step_size": 1e-4},
        "hopeless": {"draws": 8},
        "changed": {"proposal": "walk", "target_accept": 0.3},
    },
}


@cache
def fast(name: str) -> Fast:
    cls, row = doxa.get_method(name), doxa.methods()[name]
    special, sampler = SPECIAL.get(name, {}), "draws" in defaults(cls)
    leap = {"step_size": 1e6} if sampler and "step_size" in defaults(cls) else {}
    derived: dict[str, Any] = {
        "settings": short_settings(name),
        "one_step": lengths(cls, 1),
        "many_steps": lengths(cls, 20),
        "hopeless": {**lengths(cls, 4), **leap},
        "hopeless_options": {} if sampler else {"lr": 1e6},
        "changed": changed(cls, special.get("changed", {})),
        "grid": grid(cls, row),
    }
    for what, value in special.items():
        laid_over = isinstance(value, dict) and what != "grid"
        derived[what] = {**derived[what], **value} if laid_over else value
    return Fast(**derived)


def defaults(cls: Any) -> Settings:
    """Of the fields that have one."""
    return {f.name: f.default for f in dataclasses.fields(cls) if f.init}


def lengths(cls: Any, draws: int) -> Settings:
    """So many draws from the first transition on, of a method that has draws."""
    wanted = {"draws": draws, "burn_in": 0}
    known = defaults(cls)
    return {key: value for key, value in wanted.items() if key in known and "draws" in known}


def changed(cls: Any, special: Settings) -> Settings:
    """Every number a little off and every switch turned, as far as the method takes it."""
    found = dict(special)
    for name, value in defaults(cls).items():
        if name in found:
            continue
        if isinstance(value, bool):
            other: Any = not value
        elif isinstance(value, int):
            other = value + 1
        elif isinstance(value, float) and value != 0:
            other = 0.9 * value
        else:
            continue
        try:
            cls(**found, **{name: other})
        except MethodError:
            continue
        found[name] = other
    return found


def grid(cls: Any, row: Row) -> dict[str, list[Any]]:
    """Two values of the temperature, else of another number that a grid may vary, else of the
    rate; nothing where nothing is trained."""
    known = defaults(cls)
    free = sorted(cls().per_run, key=lambda name: name != "temperature")
    for name in free:
        if isinstance(known[name], float) and known[name] != 0:
            return {name: [0.5 * known[name], known[name]]}
    return {"lr": [0.3 * cls.default_rate, cls.default_rate]} if trains(row) else {}


def trains(row: Row) -> bool:
    """Whether it trains a network: the others bring their own functions, and draw nothing."""
    return row.family not in ("exact", "process", "neural process")
