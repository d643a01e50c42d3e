"""Every method at its shortest: samplers' defaults are meant for posteriors, not for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import doxa

LENGTHS = {"draws": 20, "burn_in": 20, "thin": 1}  # where a row does not say what is short


def short_settings(name: str) -> dict[str, Any]:
    """What its row says, else few draws for what has draws."""
    known = {field.name for field in dataclasses.fields(doxa.get_method(name))}
    lengths = {key: value for key, value in LENGTHS.items() if key in known}
    return dict(doxa.methods()[name].short or lengths)


def short(name: str) -> Any:
    """The method of this name; `MissingExtra` where what it needs is not installed."""
    return doxa.get_method(name)(**short_settings(name))
