"""Tables that a person gives to a page: kept in a private folder until the studio ends.

The server writes the bytes and looks at none of them. A process parses them, with the limits of all
tables, and finds them by the id that the server has made: a page never names a path.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from doxa.errors import DataError
from doxa.http import JSON, Limits, Refusal, json_bytes, read_body, single
from doxa.tables.files import PARQUET, TEXT

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LARGEST = 50 << 20  # bytes of a table
MOST = 8  # tables at a time; the oldest goes
_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"\w[\w .()+-]{0,80}")


class Uploads:
    """The folder, which other accounts of the machine cannot read."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="doxa-studio-"))
        self._kept: list[str] = []

    def close(self) -> None:
        """Delete all tables."""
        shutil.rmtree(self.folder, ignore_errors=True)

    async def receive(self, request: Request) -> Response:
        """Answer a POST with the bytes of a table; its name is in the header X-Name."""
        from starlette.responses import Response

        headers = request.scope["headers"]
        try:
            name = plain_name(unquote(single(headers, b"x-name") or ""))
            body = await read_body(headers, request.receive, Limits(body=LARGEST))
        except Refusal as error:
            found: dict[str, Any] = {"error": {"type": "Refusal", "message": error.message}}
            return Response(json_bytes(found), error.status, error.headers, JSON)
        found = {"upload": self.keep(name, body), "name": name}
        return Response(json_bytes(found), media_type=JSON)

    def keep(self, name: str, body: bytes) -> str:
        """Write a table, and return its id."""
        made = secrets.token_hex(16)
        place = self.folder / made
        place.mkdir(mode=0o700)
        (place / name).write_bytes(body)
        self._kept.append(made)
        for old in self._kept[:-MOST]:
            shutil.rmtree(self.folder / old, ignore_errors=True)
        self._kept = self._kept[-MOST:]
        return made


def plain_name(name: str) -> str:
    """A name that is safe in a folder, with the suffix of a table."""
    suffix = Path(name).suffix.lower()
    if suffix not in (*TEXT, *PARQUET):
        raise Refusal(415, "a table is a .csv, .tsv, .txt or .parquet file")
    return name if _NAME.fullmatch(name) else f"table{suffix}"


def place_of_upload(folder: Path, upload: Any) -> Path:
    """The file of an id; an error if there is none."""
    if not isinstance(upload, str) or _ID.fullmatch(upload) is None:
        raise DataError("a table is named by the id that its upload was given")
    found = sorted((folder / upload).glob("*")) if (folder / upload).is_dir() else []
    if not found:
        raise DataError("this table is no longer there: choose its file again")
    return found[0]
