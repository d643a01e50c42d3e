"""Every method at its shortest: samplers' defaults are meant for posteriors, not for tests."""

from __future__ import annotations

from typing import Any

import doxa

SETTINGS: dict[str, dict[str, Any]] = {
    "hmc": {"draws": 20, "burn_in": 20, "leapfrog": 5},
    "nuts": {"draws": 20, "burn_in": 20, "max_depth": 2},
    "metropolis": {"draws": 20, "burn_in": 20},
    "sgld": {"draws": 20, "burn_in": 20, "thin": 1, "step": 2e-4},
    "psgld": {"draws": 20, "burn_in": 20, "thin": 1, "step": 2e-5},
    "sghmc": {"draws": 20, "burn_in": 20, "thin": 1, "step": 2e-4},
    "constant-sgd": {"draws": 20, "burn_in": 10, "thin": 1, "probes": 10},
    "cyclical": {"cycles": 2, "draws": 10, "thin": 1, "exploration": 0.5, "step": 2e-4},
    "minibatch-mh": {"draws": 20, "burn_in": 20, "thin": 1},
}


def short(name: str) -> Any:
    """The method of this name; `MissingExtra` where what it needs is not installed."""
    return doxa.get_method(name)(**SETTINGS.get(name, {}))
