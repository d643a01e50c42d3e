"""A kernel's text as a tree: names, joined by + and *, with brackets.

sum = product ("+" product)*,   product = factor ("*" factor)*,   factor = name | "(" sum ")"
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from doxa.errors import MethodError, did_you_mean

_TOKEN = re.compile(r"\s*(?:([A-Za-z_][\w-]*)|(.))")


@dataclass(frozen=True)
class Leaf:
    """A kernel by its name; `label` tells it from others of that name."""

    name: str
    label: str


@dataclass(frozen=True)
class Product:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Sum:
    parts: tuple[Node, ...]


Node = Leaf | Product | Sum


def leaves(node: Node) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    else:
        for part in node.parts:
            yield from leaves(part)


def parse(text: str, known: Collection[str]) -> Node:
    """The tree of a text, or a MethodError that says where it cannot be read."""
    tokens = [name or sign for name, sign in _TOKEN.findall(text) if name or sign.strip()]
    names = [token for token in tokens if _is_name(token)]
    for name in names:
        if name not in known:
            raise MethodError(f"there is no kernel {name!r}{did_you_mean(name, known)}")
    reader = _Reader(text, tokens, {name for name in names if names.count(name) > 1})
    tree = reader.sum()
    if reader.at < len(tokens):
        raise reader.wrong("an end, + or *")
    return tree


def _is_name(token: str) -> bool:
    return token[0].isalpha() or token[0] == "_"


def _joined(kind: type[Sum] | type[Product], parts: list[Node]) -> Node:
    """Brackets that change nothing go: a + (b + c) is a + b + c."""
    flat = [inner for p in parts for inner in (p.parts if isinstance(p, kind) else (p,))]
    return flat[0] if len(flat) == 1 else kind(tuple(flat))


class _Reader:
    """Reads tokens from the left; `repeated` names are numbered in their labels."""

    def __init__(self, text: str, tokens: list[str], repeated: set[str]) -> None:
        self.text, self.tokens, self.repeated = text, tokens, repeated
        self.at = 0
        self.seen: dict[str, int] = {}

    def wrong(self, wanted: str) -> MethodError:
        ended = self.at >= len(self.tokens)
        found = "its end" if ended else f"{self.tokens[self.at]!r} (part {self.at + 1})"
        return MethodError(f"{self.text!r} cannot be read: {wanted} is expected at {found}")

    def _next_is(self, sign: str) -> bool:
        found = self.at < len(self.tokens) and self.tokens[self.at] == sign
        self.at += found
        return found

    def sum(self) -> Node:
        parts = [self.product()]
        while self._next_is("+"):
            parts.append(self.product())
        return _joined(Sum, parts)

    def product(self) -> Node:
        parts = [self.factor()]
        while self._next_is("*"):
            parts.append(self.factor())
        return _joined(Product, parts)

    def factor(self) -> Node:
        if self._next_is("("):
            inner = self.sum()
            if not self._next_is(")"):
                raise self.wrong("a closing bracket")
            return inner
        if self.at >= len(self.tokens) or not _is_name(self.tokens[self.at]):
            raise self.wrong("a kernel's name")
        name = self.tokens[self.at]
        self.at += 1
        self.seen[name] = self.seen.get(name, 0) + 1
        return Leaf(name, f"{name}-{self.seen[name]}" if name in self.repeated else name)
