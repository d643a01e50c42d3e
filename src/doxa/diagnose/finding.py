"""What the doctor says: findings, and the diagnosis they make together."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

GOOD, WARNING, BAD, NOT_CHECKED = "good", "warning", "bad", "not checked"
VERDICTS = (BAD, WARNING, GOOD, NOT_CHECKED)
_STYLES = {BAD: "bold red", WARNING: "yellow", GOOD: "green", NOT_CHECKED: "dim"}


@dataclass(frozen=True)
class Finding:
    """One check and what came of it.

    Attributes
    ----------
    check: its name. verdict: "good", "warning", "bad" or "not checked".
    value: the number it rests on, None where there is none.
    words: what was found, in plain words. advice: what to try; empty where nothing need be done.
    """

    check: str
    verdict: str
    value: float | None
    words: str
    advice: str = ""

    @property
    def alarms(self) -> bool:
        """A warning or worse."""
        return self.verdict in (WARNING, BAD)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which a doctor looks."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No finding is a warning or bad."""
        return not self.alarms

    @property
    def alarms(self) -> list[Finding]:
        """The warnings and worse, the worst first."""
        found = [finding for finding in self.findings if finding.alarms]
        return sorted(found, key=lambda finding: VERDICTS.index(finding.verdict))

    def __getitem__(self, check: str) -> Finding:
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(f"no check is called {check!r}; there are {[f.check for f in self]}")

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def to_dict(self) -> list[dict[str, Any]]:
        """The findings as plain data, for reports and JSON."""
        return [dict(vars(finding)) for finding in self.findings]

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, no_color=True)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._headline(), title_justify="left", box=None, pad_edge=False)
        table.add_column("check", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("what was found, and what to try", overflow="fold")
        for finding in self.findings:
            words = Text(finding.words)
            if finding.advice:
                words.append(f"\n→ {finding.advice}")
            verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
            table.add_row(Text(finding.check), verdict, words)
        return table

    def _headline(self) -> str:
        looked = [f for f in self.findings if f.verdict != NOT_CHECKED]
        if self.ok:
            return f"Nothing wrong was found in {len(looked)} checks."
        names = ", ".join(finding.check for finding in self.alarms)
        return f"{len(self.alarms)} of {len(looked)} checks raise an alarm: {names}."


def good(words: str, value: float | None = None) -> Finding:
    return Finding("", GOOD, value, words)


def warning(words: str, advice: str, value: float | None = None) -> Finding:
    return Finding("", WARNING, value, words, advice)


def bad(words: str, advice: str, value: float | None = None) -> Finding:
    return Finding("", BAD, value, words, advice)


def skipped(reason: str, advice: str = "") -> Finding:
    return Finding("", NOT_CHECKED, None, reason, advice)
