"""What the doctor says: findings, and the diagnosis they make together."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from doxa.diagnose.advice import NAMES, Advice

GOOD, SLIGHT, WARNING, BAD, NOT_CHECKED = "good", "slight", "warning", "bad", "not checked"
VERDICTS = (BAD, WARNING, SLIGHT, GOOD, NOT_CHECKED)
_STYLES = {BAD: "bold red", WARNING: "yellow", SLIGHT: "cyan", GOOD: "green", NOT_CHECKED: "dim"}
_SAID = {
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
UNLIKELY = 0.01  # what is not good any more, though an alarm needs `significance.ALPHA`


@dataclass(frozen=True)
class Finding:
    """One check and what came of it.

    Attributes
    ----------
    check: its name. verdict: "good", "slight", "warning", "bad" or "not checked".
    value: the number it rests on, None where there is none.
    words: what was found, in plain words. advice: what to try; empty where nothing need be done.
    code: the advice as Python, a snippet an entry; see `doxa.diagnose.advice` for its names.
    """

    check: str
    verdict: str
    value: float | None
    words: str
    advice: str = ""
    code: tuple[str, ...] = ()

    @property
    def alarms(self) -> bool:
        """A warning or worse."""
        return self.verdict in (WARNING, BAD)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which a doctor looks.

    new_rows: rows that the fit has not seen were among what it looked at.
    """

    findings: list[Finding] = field(default_factory=list)
    new_rows: bool = True

    @property
    def ok(self) -> bool:
        """No finding is a warning or bad."""
        return not self.alarms

    @property
    def alarms(self) -> list[Finding]:
        """The warnings and worse, the worst first."""
        return [finding for finding in self.ranked if finding.alarms]

    @property
    def ranked(self) -> list[Finding]:
        """All findings, the worst first."""
        return sorted(self.findings, key=lambda finding: VERDICTS.index(finding.verdict))

    @property
    def verdict(self) -> str:
        """The worst of all that was looked at."""
        return self.ranked[0].verdict if self.findings else NOT_CHECKED

    @property
    def headline(self) -> str:
        """The verdict and how many findings it rests on: "Use it with care: 2 warnings"."""
        said = _SAID[self.verdict]
        counts = [
            f"{len(found)} {words[len(found) != 1]}"
            for verdict, words in _COUNTED.items()
            if (found := self._of(verdict))
        ]
        if counts:
            first = ", ".join(counts[:-1])
            return f"{said}: {first}{' and ' if first else ''}{counts[-1]}"
        if self.verdict == GOOD:
            checks = len(self._of(GOOD))
            said += f" in {checks} check{'s' * (checks != 1)}"
            return said if self.new_rows else f"{said} of the rows it was fitted to"
        return said

    @property
    def summary(self) -> str:
        """The headline as a sentence, with the checks that it is about, the worst first."""
        found = [finding.check for verdict in _COUNTED for finding in self._of(verdict)]
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        named = f" ({', '.join(found[:_MOST_NAMED])}{more})" if found else ""
        unseen = "" if self.new_rows or not self.findings else (
            "; rows that the fit has not seen would tell more"
        )  # fmt: skip
        return f"{self.headline}{named}{unseen}."

    @property
    def code(self) -> list[str]:
        """What to try about faults, as Python: each snippet once, those of the worst first."""
        faults = [f for f in self.ranked if f.verdict not in (GOOD, NOT_CHECKED)]
        return list(dict.fromkeys(snippet for f in faults for snippet in f.code))

    def _of(self, verdict: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == verdict]

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
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        table.add_column("check", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("what was found, and what to try", overflow="fold")
        for finding in self.findings:
            words = Text(finding.words)
            if finding.advice:
                words.append(f"\n→ {finding.advice}")
            verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
            table.add_row(Text(finding.check), verdict, words)
        tried = [Text(f"\n{snippet}") for snippet in self.code]
        about = [Text(f"\nIn Python ({NAMES}):", style="dim")] if tried else []
        return Group(Text(self.summary), table, *about, *tried)


def number(value: float) -> str:
    """Two digits, and no power of ten for what can be read without."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"


def good(words: str, value: float | None = None) -> Finding:
    return Finding("", GOOD, value, words)


def by_chance(words: str, p: float, value: float | None = None) -> Finding:
    """What the level of an alarm leaves to chance: good, or slight where it is unlikely."""
    if p > UNLIKELY:
        return good(f"{words} (p = {p:.2g})", value)
    return slight(f"{words} (p = {p:.2g}: unlikely by chance, too likely for an alarm)", "", value)


def slight(words: str, advice: Advice | str = "", value: float | None = None) -> Finding:
    """There, beyond chance, and too small for an alarm."""
    return _advised(SLIGHT, words, advice, value)


def warning(words: str, advice: Advice | str, value: float | None = None) -> Finding:
    return _advised(WARNING, words, advice, value)


def bad(words: str, advice: Advice | str, value: float | None = None) -> Finding:
    return _advised(BAD, words, advice, value)


def skipped(reason: str, advice: Advice | str = "", value: float | None = None) -> Finding:
    return _advised(NOT_CHECKED, reason, advice, value)


def _advised(verdict: str, words: str, advice: Advice | str, value: float | None) -> Finding:
    given = Advice(advice) if isinstance(advice, str) else advice
    return Finding("", verdict, value, words, given.words, given.code)
