"""What is said of a method: one `Row`, and its panel in the demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Demo:
    """A method's panel in the demo: a note beside its name, its settings, and `fit`'s options.

    hidden: the widths of a network of its own, where the demo's does not suit it.
    left_out: why it has no panel; empty where it has one.
    """

    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    hidden: tuple[int, ...] = ()
    left_out: str = ""


@dataclass(frozen=True)
class Row:
    """One method: its name, where it lives, and what a person choosing wants to know.

    gives: what one gets from it, in a few words: the last column of the README's table.
    short: settings that make it quick, for tests and first looks; not for a posterior to trust.
    demo: its panel; without a word about it, its defaults.
    docs: the page under docs/ that describes it.
    evidence, elbo: whether its posterior has a `log_evidence`, or a bound on it.
    """

    name: str
    target: str  # "module:Class"
    family: str
    summary: str
    paper: str
    needs: str
    cost: str  # in multiples of one MAP fit
    tasks: tuple[str, ...] = ("regression", "classification")
    extra: str | None = None
    _: KW_ONLY
    gives: str = ""
    short: Mapping[str, Any] = field(default_factory=dict, hash=False)
    demo: Demo = Demo()
    docs: str = ""
    evidence: bool = False
    elbo: bool = False

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def class_name(self) -> str:
        return self.target.partition(":")[2]
