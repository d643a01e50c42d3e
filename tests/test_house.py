"""Rules of the house that a machine can check: how far a call walks, and which words are used."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "doxa"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Words of this house that nobody in the field would search for, in prose and messages.
DIALECT = re.compile(
    r"\b(strangers?|doubts?|doubtful|left out|believes?|believed|beliefs?|freshness|told|sprouts?"
    r"|patients?|judge?ments?|verdicts?)\b",
    re.IGNORECASE,
)
# Uses that stay: deprecated public names (`Study.belief`, `Finding.verdict`), and real patients.
KEPT = {
    "docs/compare.md": 1, "docs/neural_processes.md": 3, "docs/versions.md": 4,
    "src/doxa/decide/design/__init__.py": 2,
    "src/doxa/decide/design/study.py": 1, "src/doxa/diagnose/finding.py": 2,
}  # fmt: skip
# Identifiers that the glossary replaced.
REPLACED = {
    "believe", "say_if_trained", "check_reach", "understood", "ask_left_out", "place_data",
    "launch", "try_engine", "Ahead", "Known", "folded", "unfolded",
    "OwnFunctions", "Noisy", "plant", "sprout", "climb", "glance", "take_in", "Book", "Patient",
    "Judged", "Asked",
}  # fmt: skip


def test_a_fit_enters_few_files_and_the_tour_stops_at_each() -> None:
    """A fit, a prediction and `doxa fit`, in a process of its own: what an earlier fit has cached
    is not walked. The script fails where a limit is exceeded."""
    command = [sys.executable, str(ROOT / "benchmarks" / "walk.py"), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.partition("\n\n")[0] + done.stderr
    walked = set(re.findall(r"^(\S+\.py) \(\d+\)$", done.stdout, re.MULTILINE))
    text = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8").partition("## What a fit")[2]
    named = set(re.findall(r"^\| `([\w/]+\.py)` \| `", text, re.MULTILINE))
    assert walked == named, "docs/tour.md: the walk, and its counts at the end"


def test_the_package_has_few_files() -> None:
    """300 when the house was rebuilt. What came after has a number of its own: samplers to watch
    (5), processes (5), streams (5), a server (6), the studio (16), pictures and tables (5). And
    files stay whole: few are short."""
    lengths = [len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCE.rglob("*.py")]
    assert len(lengths) <= 300 + 42
    assert sum(length < 60 for length in lengths) <= 40
    assert sum(lengths) / len(lengths) >= 230


def tokens(path: Path, words: re.Pattern[str]) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a file, or none if the words are nowhere in its text, as in most files."""
    text = path.read_text(encoding="utf-8")
    if words.search(text):
        yield from tokenize.generate_tokens(io.StringIO(text).readline)


def test_prose_and_messages_use_the_words_of_the_field() -> None:
    """Docstrings, comments, messages and pages; identifiers are checked below."""
    found: Counter[str] = Counter()
    where: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        for token in tokens(path, DIALECT):
            if token.type not in (tokenize.COMMENT, tokenize.STRING):
                continue
            for match in DIALECT.finditer(token.string):
                name = path.relative_to(ROOT).as_posix()
                found[name] += 1
                where.append(f"{name}:{token.start[0]} {match[0]}")
    for path in PAGES:
        for match in DIALECT.finditer(path.read_text(encoding="utf-8")):
            found[path.relative_to(ROOT).as_posix()] += 1
            where.append(f"{path.name} {match[0]}")
    assert dict(found) == KEPT, where


def test_identifiers_are_those_of_the_field() -> None:
    words = re.compile(rf"\b({'|'.join(sorted(REPLACED))})\b")
    found = {
        f"{path.relative_to(SOURCE).as_posix()}:{token.start[0]} {token.string}"
        for path in SOURCE.rglob("*.py")
        for token in tokens(path, words)
        if token.type == tokenize.NAME and token.string in REPLACED
    }
    assert found == set()
