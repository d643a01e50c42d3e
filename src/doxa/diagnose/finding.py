"""`Finding`: the result of one check. `Diagnosis`: all findings of a posterior.

The functions `good`, `slight`, `warning`, `bad` and `skipped` make findings of that status; a check
returns one of them, and `diagnose` fills in its name.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from doxa.diagnose.advice import NAMES, Advice
from doxa.errors import deprecated

GOOD, SLIGHT, WARNING, BAD, NOT_CHECKED = "good", "slight", "warning", "bad", "not checked"
STATUSES = (BAD, WARNING, SLIGHT, GOOD, NOT_CHECKED)
_STYLES = {BAD: "bold red", WARNING: "yellow", SLIGHT: "cyan", GOOD: "green", NOT_CHECKED: "dim"}
_HEADLINES = {
    BAD: "Do not rely on it",
    WARNING: "Use it with care",
    SLIGHT: "No alarm",
    GOOD: "No fault was found",
    NOT_CHECKED: "Nothing could be checked",
}
_COUNTED = {
    BAD: ("bad finding", "bad findings"),
    WARNING: ("warning", "warnings"),
    SLIGHT: ("slight finding", "slight findings"),
}
_MOST_NAMED = 4
UNLIKELY = 0.01  # below it a result is not good; an alarm needs the smaller `data.ALPHA`


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    check : str
        Name of the check.
    status : str
        "good", "slight", "warning", "bad" or "not checked".
    value : float or None
        The number that the status is based on. None if there is none.
    words : str
        Message: what was found.
    advice : str
        What to try. Empty if nothing needs to be done.
    code : tuple of str
        The advice as Python, one snippet per entry. `doxa.diagnose.advice` defines the names that
        the snippets use.
    """

    check: str
    status: str
    value: float | None
    words: str
    advice: str = ""
    code: tuple[str, ...] = ()

    @property
    def alarms(self) -> bool:
        """Whether the status is "warning" or "bad"."""
        return self.status in (WARNING, BAD)

    @property
    def verdict(self) -> str:
        """Deprecated alias of `status`."""
        deprecated("Finding.verdict", "Finding.status")
        return self.status


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a posterior, in the order of the checks.

    Attributes
    ----------
    findings : list of Finding
        One finding per check.
    new_rows : bool
        Whether held-out rows were among the rows that were checked.
    """

    findings: list[Finding] = field(default_factory=list)
    new_rows: bool = True

    @property
    def ok(self) -> bool:
        """Whether no finding is a warning or bad."""
        return not self.alarms

    @property
    def alarms(self) -> list[Finding]:
        """The findings that are warnings or bad, the worst first."""
        return [finding for finding in self.ranked if finding.alarms]

    @property
    def ranked(self) -> list[Finding]:
        """All findings, the worst first."""
        return sorted(self.findings, key=lambda finding: STATUSES.index(finding.status))

    @property
    def status(self) -> str:
        """The worst status of all findings: "bad", "warning", "slight", "good" or "not checked"."""
        return self.ranked[0].status if self.findings else NOT_CHECKED

    @property
    def verdict(self) -> str:
        """Deprecated alias of `status`."""
        deprecated("Diagnosis.verdict", "Diagnosis.status")
        return self.status

    @property
    def headline(self) -> str:
        """The status and the number of findings behind it: "Use it with care: 2 warnings"."""
        text = _HEADLINES[self.status]
        counts = [
            f"{len(found)} {forms[len(found) != 1]}"
            for status, forms in _COUNTED.items()
            if (found := self._of(status))
        ]
        if counts:
            first = ", ".join(counts[:-1])
            return f"{text}: {first}{' and ' if first else ''}{counts[-1]}"
        if self.status == GOOD:
            checks = len(self._of(GOOD))
            text += f" in {checks} check{'s' * (checks != 1)}"
            return text if self.new_rows else f"{text} of the rows it was fitted to"
        return text

    @property
    def summary(self) -> str:
        """The headline as a sentence, with the names of the checks behind it, the worst first."""
        found = [finding.check for status in _COUNTED for finding in self._of(status)]
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        named = f" ({', '.join(found[:_MOST_NAMED])}{more})" if found else ""
        unseen = "" if self.new_rows or not self.findings else (
            "; checks on held-out rows would be more reliable"
        )  # fmt: skip
        return f"{self.headline}{named}{unseen}."

    @property
    def code(self) -> list[str]:
        """Remedies as Python: each snippet once, those of the worst findings first."""
        faults = [f for f in self.ranked if f.status not in (GOOD, NOT_CHECKED)]
        return list(dict.fromkeys(snippet for f in faults for snippet in f.code))

    def _of(self, status: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == status]

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
        """Return the findings as plain data, for reports and JSON."""
        return [dict(vars(finding)) for finding in self.findings]

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, no_color=True)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        table.add_column("check", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("what was found, and what to try", overflow="fold")
        for finding in self.findings:
            message = Text(finding.words)
            if finding.advice:
                message.append(f"\n→ {finding.advice}")
            status = Text(finding.status, style=_STYLES[finding.status])
            table.add_row(Text(finding.check), status, message)
        tried = [Text(f"\n{snippet}") for snippet in self.code]
        about = [Text(f"\nIn Python ({NAMES}):", style="dim")] if tried else []
        return Group(Text(self.summary), table, *about, *tried)


def number(value: float) -> str:
    """Two digits; no power of ten between 100 and a million."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"


def good(message: str, value: float | None = None) -> Finding:
    return Finding("", GOOD, value, message)


def by_chance(message: str, p: float, value: float | None = None) -> Finding:
    """A result with p above the level of an alarm: good, or slight if p is below `UNLIKELY`."""
    if p > UNLIKELY:
        return good(f"{message} (p = {p:.2g})", value)
    note = "unlikely by chance, too likely for an alarm"
    return slight(f"{message} (p = {p:.2g}: {note})", "", value)


def slight(message: str, advice: Advice | str = "", value: float | None = None) -> Finding:
    """An effect that is beyond chance but too small for an alarm."""
    return _advised(SLIGHT, message, advice, value)


def warning(message: str, advice: Advice | str, value: float | None = None) -> Finding:
    return _advised(WARNING, message, advice, value)


def bad(message: str, advice: Advice | str, value: float | None = None) -> Finding:
    return _advised(BAD, message, advice, value)


def skipped(reason: str, advice: Advice | str = "", value: float | None = None) -> Finding:
    return _advised(NOT_CHECKED, reason, advice, value)


def _advised(status: str, message: str, advice: Advice | str, value: float | None) -> Finding:
    given = Advice(advice) if isinstance(advice, str) else advice
    return Finding("", status, value, message, given.words, given.code)
