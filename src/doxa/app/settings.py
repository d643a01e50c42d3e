"""A method's hyper-parameters on the command line: its dataclass fields are the flags.

`--set rank=20 --set temperature=0.1` makes `SWAG(rank=20, temperature=0.1)`. Values are read as
Python literals (numbers, true/false, none, tuples), and as plain text where they are none. What a
field declares to allow (`doxa.method.fields`) is shown beside it and checked by the method.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import doxa
from doxa.errors import MethodError, did_you_mean
from doxa.method.fields import Choice, Rule, rules
from doxa.registry import Row

_WORDS = {"true": True, "false": False, "none": None, "null": None}


def make_method(name: str, settings: Sequence[str] = ()) -> Any:
    """The method with `--set` values applied; a value it refuses is its own error."""
    cls = doxa.get_method(name)
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    declared = rules(cls)
    chosen: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise MethodError(f"--set takes NAME=VALUE, not {setting!r}")
        if key not in fields:
            hint = did_you_mean(key, sorted(fields)) if fields else "; it has no settings"
            raise MethodError(f"method {name!r} has no setting {key!r}{hint}")
        if key in chosen:
            raise MethodError(f"--set {key} is given twice, as {chosen[key]!r} and as {text}")
        chosen[key] = read_value(text, declared.get(key))
    try:
        return cls(**chosen)
    except (TypeError, AttributeError) as error:  # a check of its own met the wrong type
        shown = ", ".join(settings)
        raise MethodError(f"method {name!r} cannot use {shown}: {error}") from error


def fields_of(cls: Any) -> list[tuple[str, str, str, str]]:
    """(setting, type, default, what is allowed) of every hyper-parameter."""
    rows, declared = [], rules(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.default is not dataclasses.MISSING:
            default = repr(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = repr(field.default_factory())
        else:
            default = "required"
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
        allowed = declared[field.name].words(field.name) if field.name in declared else ""
        rows.append((field.name, str(kind), default, allowed))
    return rows


def show_methods(console: Console) -> None:
    """The table of methods; what does not fit a narrow terminal is in `doxa methods NAME`."""
    columns = {"name": "method", "family": "family", "summary": "what it is"}
    if console.width >= 120:
        columns |= {"gives": "gives", "cost": "cost (MAP = 1)", "paper": "paper"}
    if console.width >= 160:
        columns |= {"needs": "needs"}
    table = Table(*columns.values())
    for row in doxa.methods():
        table.add_row(*(escape(getattr(row, name)) for name in columns))
    console.print(table)
    console.print("doxa methods NAME lists a method's settings, what it needs, its cost and paper")


def facts_of(row: Row) -> dict[str, str]:
    """What a row says of its method beyond what it is; nothing where it says nothing."""
    numbers = [word for word, has in (("evidence", row.evidence), ("ELBO", row.elbo)) if has]
    facts = {
        "for": ", ".join(row.tasks),
        "gives": row.gives,
        "model selection by": ", ".join(numbers),
        "needs": row.needs,
        "extra": f"pip install 'doxa[{row.extra}]'" if row.extra else "",
        "cost": row.cost,
        "paper": row.paper,
        "described in": f"docs/{row.docs}" if row.docs else "",
    }
    return {what: said for what, said in facts.items() if said}


def show_method(name: str, console: Console) -> None:
    """One method: what it is, where it comes from, its settings."""
    row, cls = doxa.methods()[name], doxa.get_method(name)
    console.print(f"[bold]{escape(row.name)}[/] ({escape(row.family)}): {escape(row.summary)}")
    for what, said in facts_of(row).items():
        console.print(f"{what}: {escape(said)}", highlight=False)
    console.print(escape(inspect.cleandoc(cls.__doc__ or "")), highlight=False)
    table = Table("--set", "type", "default", "allowed")
    for field in fields_of(cls):
        table.add_row(*map(escape, field))
    console.print(table if table.row_count else "no settings")


def read_value(text: str, rule: Rule | None = None) -> Any:
    """The value as it was meant: the name of a choice is a name, also where it reads "none"."""
    text = text.strip()
    if isinstance(rule, Choice) and text in rule.choices:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
