"""The command line as a test calls it: in this process, or in one that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from doxa.app.cli import app


def doxa(*words: object, code: int = 0) -> str:
    """What a command says, in one line; it must end with this exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    text = result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, text
    return " ".join(text.split())


def started(*words: object, log: Path) -> subprocess.Popen[bytes]:
    """The same in a process of its own, what it says appended to a file."""
    command = [sys.executable, "-c", "from doxa.app.cli import main; main()", *map(str, words)]
    path = os.pathsep.join(part for part in sys.path if part)
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path}
        )
