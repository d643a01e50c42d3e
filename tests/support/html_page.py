"""Reads a page with the standard library's parser and lists what is wrong with it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "hr", "link", "input", "area", "base", "col", "source", "wbr"}
FETCHES = {"script", "link", "iframe", "object", "embed", "base", "form", "video", "audio", "use",
           "foreignobject", "animate", "set", "input", "button"}  # fmt: skip


@dataclass
class Node:
    """An element, its attributes and what is in it."""

    name: str
    attributes: dict[str, str | None]
    parent: Node | None = None
    children: list[Node | str] = field(default_factory=list)

    def walk(self) -> list[Node]:
        found = [self]
        for child in self.children:
            if isinstance(child, Node):
                found += child.walk()
        return found

    def all(self, name: str) -> list[Node]:
        return [node for node in self.walk() if node.name == name]

    def by_class(self, name: str) -> list[Node]:
        return [n for n in self.walk() if name in (n.attributes.get("class") or "").split()]

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self.at = self.root
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.faults.append(f"<{tag}> repeats an attribute")
        node = Node(tag, dict(attrs), self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_endtag(self, tag: str) -> None:
        if tag != self.at.name:
            self.faults.append(f"</{tag}> closes <{self.at.name}>")
        self.at = self.at.parent or self.root

    def handle_data(self, data: str) -> None:
        self.at.children.append(data)

    def handle_comment(self, data: str) -> None:
        self.faults.append(f"a comment: {data[:40]!r}")


def parse(text: str) -> tuple[Node, list[str]]:
    """The tree, and everything a report must not have or lacks."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    root, faults = reader.root, reader.faults
    if reader.at is not root:
        faults.append(f"<{reader.at.name}> is not closed")
    nodes = root.walk()
    ids = [n.attributes["id"] for n in nodes if "id" in n.attributes]
    faults += [f"id {i!r} is used twice" for i in sorted({i for i in ids if ids.count(i) > 1})]
    for node in nodes:
        faults += _node_faults(node, set(ids))
    faults += _page_faults(root)
    return root, faults


def _node_faults(node: Node, ids: set[str | None]) -> list[str]:
    faults = []
    if node.name in FETCHES:
        faults.append(f"<{node.name}> is there")
    for key, value in node.attributes.items():
        if key.startswith("on") or key in ("style", "srcdoc", "srcset", "action", "formaction"):
            faults.append(f"<{node.name} {key}=…> is there")
        if key in ("href", "src", "xlink:href"):
            inside = (value or "").startswith("#") and (value or "")[1:] in ids
            if not inside and not (value or "").startswith("data:image/png;base64,"):
                faults.append(f"{key}={value!r} leads out of the file, or nowhere")
        if key in ("aria-labelledby", "aria-describedby"):
            faults += [
                f"{key} names no element: {i}" for i in (value or "").split() if i not in ids
            ]
    if node.name == "svg":
        kinds = [c.name for c in node.children if isinstance(c, Node)]
        words = [c.text.strip() for c in node.children if isinstance(c, Node)][:2]
        if kinds[:2] != ["title", "desc"] or not all(words) or node.attributes.get("role") != "img":
            faults.append("an svg lacks its title, description or role")
    if node.name == "img" and not node.attributes.get("alt"):
        faults.append("an img lacks alt")
    if node.name == "figure" and not (node.all("figcaption") and node.all("table")):
        faults.append("a figure lacks its caption or its table")
    if node.name == "table" and not node.all("caption"):
        faults.append("a table lacks its caption")
    if node.name == "th" and node.attributes.get("scope") not in ("row", "col"):
        faults.append("a th lacks its scope")
    if node.name == "details" and not node.all("summary"):
        faults.append("a details lacks its summary")
    return faults


def _page_faults(root: Node) -> list[str]:
    faults = []
    for name in ("html", "head", "body", "main", "header", "nav", "footer", "h1", "style"):
        if len(root.all(name)) != 1 and not (name == "header" and root.all(name)):
            faults.append(f"{len(root.all(name))} <{name}> elements")
    levels = [int(n.name[1]) for n in root.walk() if re.fullmatch("h[1-6]", n.name)]
    for before, after in itertools.pairwise(levels):
        if after > before + 1:
            faults.append(f"a heading jumps from h{before} to h{after}")
    policies = [n for n in root.all("meta")
                if n.attributes.get("http-equiv") == "Content-Security-Policy"]  # fmt: skip
    digest = base64.b64encode(hashlib.sha256(root.all("style")[0].text.encode()).digest()).decode()
    wanted = {"default-src 'none'", f"style-src 'sha256-{digest}'", "img-src data:",
              "base-uri 'none'", "form-action 'none'"}  # fmt: skip
    given = {part.strip() for p in policies for part in (p.attributes["content"] or "").split(";")}
    if given != wanted or len(policies) != 1:
        faults.append(f"the policy is {given}")
    if re.search(r"url\(|@import|expression\(", root.all("style")[0].text):
        faults.append("the style fetches something")
    return faults
