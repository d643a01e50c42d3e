"""What `doxa serve` refuses, each limit with a request beyond it, and requests that are damaged."""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import random
import socket
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import doxa

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")

from served import SECONDS, Gated, Server  # noqa: E402

from doxa import http  # noqa: E402
from doxa.app.fitting import load_run  # noqa: E402
from doxa.app.serve import ARROW  # noqa: E402
from doxa.errors import MethodError  # noqa: E402

JSON = {"Content-Type": "application/json"}
GOOD = {"x": 1.0, "z": 2.0, "c": "a"}
TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Any, Any]:
    folder: Path = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=80), "z": rng.normal(5, 2, size=80)})
    frame["c"] = rng.choice(["a", "b"], 80)
    frame["y"] = 2 * frame["x"] - frame["z"] + rng.normal(0, 0.3, 80)
    frame.to_csv(folder / "train.csv", index=False)
    doxa("fit", folder / "train.csv", "-t", "y", "-m", "linear", "-o", folder / "run",
         "--allow-status")  # fmt: skip
    return load_run(folder / "run")


@pytest.fixture(scope="module")
def server(run):
    with Server(run) as made:
        yield made


def error(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    """The status and message of a refusal, which is always JSON."""
    status, headers, content = answer
    assert headers["content-type"] == "application/json"
    found = json.loads(content)["error"]
    assert set(found) == {"type", "message"}
    return status, found["message"]


def head(server: Server, *lines: str, path: str = "/predict", method: str = "POST") -> bytes:
    first = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}"]
    return "\r\n".join([*first, *lines, "", ""]).encode()


def test_bytes_are_counted_while_they_arrive(run) -> None:
    with Server(run, body=1000) as server:
        assert server.predict([GOOD] * 10)["rows"]
        status, message = error(server.ask("POST", "/predict", b"[" * 1001, JSON))
        assert status == 413 and "1,000 bytes" in message
        # by the header alone, before a byte of the body: the answer comes at once
        lines = ["Content-Type: application/json", f"Content-Length: {1 << 40}"]
        assert b" 413 " in server.raw(head(server, *lines))
        # no length in the header, and no end: the limit ends it
        lines = ["Content-Type: application/json", "Transfer-Encoding: chunked"]
        data = head(server, *lines) + b"64\r\n" + b" " * 100 + b"\r\n"
        data += 10 * (b"64\r\n" + b" " * 100 + b"\r\n")
        found = server.raw(data)
        assert b" 413 " in found and b"more than 1,000 bytes" in found


def test_a_body_that_is_encoded_is_refused(server) -> None:
    found = error(server.ask("POST", "/predict", b"1", JSON | {"Content-Encoding": "gzip"}))
    assert found == (415, "the body is encoded (gzip): send it as it is")


def test_rows_columns_and_text(run) -> None:
    with Server(run, rows=5, columns=8, text=20) as server:
        assert len(server.predict([GOOD] * 5)["rows"]) == 5
        assert "5 are predicted at a time" in server.predict([GOOD] * 6, 413)["error"]["message"]
        columns = {"columns": {"x": [1] * 6, "z": [1] * 6, "c": ["a"] * 6}}
        assert "6 rows" in server.predict(columns, 413)["error"]["message"]
        wide = GOOD | {f"w{k}": 1 for k in range(6)}
        assert "9 columns" in server.predict([wide], 413)["error"]["message"]
        assert server.predict([GOOD | {"c": "a" * 20}])
        assert "20 characters" in server.predict([GOOD | {"c": "a" * 21}], 422)["error"]["message"]


def test_nesting_is_refused_before_it_is_parsed(server, monkeypatch) -> None:
    monkeypatch.setattr(json, "loads", None)  # would fail
    for body in (b'{"a":' * 9 + b"1" + b"}" * 9, b"[" * 9 + b"]" * 9, b"[" * 100_000):
        with pytest.raises(http.Refusal, match=r"nested|match"):
            http.parse_json(body, 8)
    http.check_json(b"[" * 8 + b"]" * 8, 8)
    http.check_json(rb'["[[[[[[[[[[", "\"]]]{{{", "\\"]', 1)  # in strings they are text
    with pytest.raises(http.Refusal, match="do not match"):
        http.check_json(b"[}", 8)


def test_long_json_is_checked_quickly() -> None:
    """Strings without end, with and without escapes: no time beyond the length."""
    began = time.process_time()
    for start in (b"\\", b"a", b'\\"', b'["\\"', b'"'):
        body = b'"' + start * (1_000_000 // len(start))
        with pytest.raises(http.Refusal):
            http.parse_json(body, 8)
    assert time.process_time() - began < 5.0


def test_many_keys_in_many_rows_take_no_more_than_they_are(run) -> None:
    """A table of every key in every row would have 4 · 10⁸ cells."""
    rows = [GOOD | {f"key{k * 25 + j}": 1 for j in range(25)} for k in range(4000)]
    body = json.dumps(rows).encode()
    with Server(run, columns=1 << 20) as server:
        tracemalloc.start()
        try:
            found = server.predict(body)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert len(found["rows"]) == 4000 and peak < 60 * len(body)


def stream(table: Any) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as made:
        made.write_table(table)
    return sink.getvalue()


def test_arrow_that_unpacks_to_much_is_refused(server) -> None:
    """A few bytes that say they are 10⁹ rows."""
    empty = pa.nulls(10**9)
    nulls = pa.table({"x": empty, "z": empty, "c": empty})
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([10**9], pa.int64()), pa.array([1.0]))
    for table in (nulls, pa.table({"x": runs, "z": runs, "c": runs})):
        body = stream(table)
        assert len(body) < 4000
        status, message = error(server.ask("POST", "/predict", body, {"Content-Type": ARROW}))
        assert (status, "1,000,000,000 rows" in message) == (413, True)
    views = pa.table({"x": [1.0], "z": [1.0], "c": pa.array(["a"], pa.string_view())})
    found = error(server.ask("POST", "/predict", stream(views), {"Content-Type": ARROW}))
    assert found == (422, "column 'c' holds string_view: not read")


def test_too_many_requests_are_429(run) -> None:
    gated = Gated(run[0])
    with Server(run, posterior=gated, waiting=2) as server, ThreadPoolExecutor(2) as pool:
        gated.close()
        first = pool.submit(server.predict, [GOOD])
        assert gated.entered.wait(SECONDS)
        second = pool.submit(server.predict, [GOOD])
        until = time.monotonic() + SECONDS
        while server.batcher.waiting < 1 and time.monotonic() < until:
            time.sleep(0.005)
        answer = server.ask("POST", "/predict", json.dumps([GOOD]), JSON)
        assert error(answer)[0] == 429 and answer[1]["retry-after"] == "1"
        assert server.ask("GET", "/health")[0] == 200  # which holds no place
        gated.gate.set()
        assert first.result(SECONDS) and second.result(SECONDS)
        for _ in range(3):  # a place is given back after an error, too
            server.predict([{}], 422)
        assert server.predict([GOOD])


@pytest.mark.slow
def test_a_deadline_is_504_and_its_work_is_dropped(run) -> None:
    gated = Gated(run[0])
    with Server(run, posterior=gated, seconds=2.0) as server, ThreadPoolExecutor(2) as pool:
        gated.close()
        first = pool.submit(server.predict, [GOOD], 504)
        assert gated.entered.wait(SECONDS)
        second = pool.submit(server.predict, [GOOD] * 7, 504)
        began = time.monotonic()
        assert "no answer within 2 s" in first.result(SECONDS)["error"]["message"]
        second.result(SECONDS)
        assert time.monotonic() - began < 20
        gated.gate.set()
        until = time.monotonic() + SECONDS
        while server.batcher.dropped < 1 and time.monotonic() < until:
            time.sleep(0.005)
        assert server.batcher.dropped == 1 and gated.rows == [1]


def test_a_body_or_a_head_that_does_not_arrive(run, monkeypatch) -> None:
    monkeypatch.setattr(http, "HEADER_SECONDS", 0.3)
    with Server(run, seconds=0.3) as server:
        lines = ["Content-Type: application/json", "Content-Length: 100"]
        found = server.raw(head(server, *lines) + b"[")
        assert b" 408 " in found and b"did not arrive" in found
        assert server.raw(b"POST /predict HTT") == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as client:
            client.sendall(head(server, path="/health", method="GET"))
            found = b""
            while b"ready" not in found:
                found += client.recv(1 << 16)
            client.sendall(b"GET /hea")  # the second head on a connection
            assert client.recv(1 << 16) == b""


def test_what_is_no_http_is_answered_in_json(server) -> None:
    found = server.raw(b"\x16\x03\x01 hello\r\n\r\n")
    assert b" 400 " in found and json.loads(found.partition(b"\r\n\r\n")[2])["error"]["type"]


def test_paths_methods_and_forms(server) -> None:
    assert error(server.ask("GET", "/"))[0] == 404
    assert error(server.ask("GET", "/predict/"))[0] == 404
    answer = server.ask("GET", "/predict")
    assert error(answer) == (405, "this path takes POST")
    assert error(server.ask("DELETE", "/health"))[0] == 405
    assert error(server.ask("OPTIONS", "/predict"))[0] == 405  # no page may ask by CORS
    assert error(server.ask("POST", "/predict", b"1"))[0] == 415
    assert error(server.ask("POST", "/predict", b"1", {"Content-Type": "text/plain"}))[0] == 415
    body = json.dumps([GOOD])
    for accept, status in (
        ("text/html", 406), ("*/*", 200), ("text/html, application/*;q=.5", 200),
        ("application/json;q=0", 406), (f"application/json; q=0, {ARROW}", 200),
    ):  # fmt: skip
        assert server.ask("POST", "/predict", body, JSON | {"Accept": accept})[0] == status
    assert error(server.ask("POST", "/predict?rows=3", body, JSON))[0] == 400
    assert error(server.ask("POST", "/predict?level=x", body, JSON))[0] == 400


def test_the_host_header_is_that_of_the_server(server) -> None:
    """A page whose name leads to 127.0.0.1 sends its own name."""
    port = server.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert server.ask("GET", "/health", headers={"Host": host})[0] == 200
    for host in (
        f"evil.example:{port}", "127.0.0.1", "localhost", f"127.0.0.1:{port + 1}", "",
        f"127.0.0.1:{port}.evil.example", f"localhost.evil.example:{port}",
    ):  # fmt: skip
        assert error(server.ask("GET", "/health", headers={"Host": host}))[0] == 421, host
    two = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: evil\r\n\r\n"
    assert b" 400 " in server.raw(two.encode())
    assert b" 421 " in server.raw(b"GET /health HTTP/1.0\r\n\r\n")


def test_a_page_of_another_origin_is_refused(server) -> None:
    body = json.dumps([GOOD])
    for origin, status in (
        ("http://evil.example", 403), ("null", 403), (f"http://127.0.0.1:{server.port + 1}", 403),
        (f"http://127.0.0.1:{server.port}", 200),
    ):  # fmt: skip
        assert server.ask("POST", "/predict", body, JSON | {"Origin": origin})[0] == status


def test_a_token(run, monkeypatch) -> None:
    compared: list[tuple[int, int]] = []
    own = hmac.compare_digest

    def recorded(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return own(a, b)

    monkeypatch.setattr(http.hmac, "compare_digest", recorded)
    body = json.dumps([GOOD])
    with Server(run, token=TOKEN) as server:
        for given in (
            None, "", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN,
            f"Bearer {TOKEN} {TOKEN}", "Bearer \xe9",
        ):  # fmt: skip
            headers = {} if given is None else {"Authorization": given}
            answer = server.ask("POST", "/predict", body, JSON | headers)
            assert error(answer)[0] == 401 and answer[1]["www-authenticate"] == "Bearer", given
            assert server.ask("GET", "/schema", headers=headers)[0] == 401
            assert json.loads(server.ask("GET", "/health", headers=headers)[2]) == {"ready": True}
        # by digests of one length, whatever was given
        assert len(compared) == 27 and set(compared) == {(32, 32)}
        headers = {"Authorization": f"bearer {TOKEN}"}
        assert server.ask("POST", "/predict", body, JSON | headers)[0] == 200
        assert "name" in json.loads(server.ask("GET", "/health", headers=headers)[2])
        lines = [f"Authorization: Bearer {TOKEN}", "Authorization: Bearer x", "Content-Length: 0"]
        assert b" 400 " in server.raw(head(server, *lines))
        # refused by its head: the body is not waited for
        assert b" 401 " in server.raw(head(server, f"Content-Length: {1 << 30}"))
    with pytest.raises(MethodError, match="without spaces"):
        http.bearer("with a space in between")


def test_a_websocket_passes_the_same_checks() -> None:
    """For servers that have some: the answer is the code for a policy, 1008."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    guard = http.Guard(app, ["127.0.0.1:80"], http.bearer(TOKEN))
    right = [(b"host", b"127.0.0.1:80"), (b"authorization", f"Bearer {TOKEN}".encode())]

    def asked(headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/", "headers": headers}
        asyncio.run(guard(scope, None, send))
        return sent[0]

    assert asked(right)["type"] == "websocket.accept"
    for wrong in (right[:1], [(b"host", b"evil"), right[1]], [*right, (b"origin", b"http://e")]):
        assert asked(wrong)["type"] == "websocket.close" and asked(wrong)["code"] == 1008


def test_where_a_server_listens() -> None:
    assert all(map(http.is_loopback, ("127.0.0.1", "127.3.4.5", "::1", "[::1]", "localhost")))
    others = ("0.0.0.0", "::", "192.168.1.1", "example.org", "127.0.0.1.evil.example", "")
    assert not any(map(http.is_loopback, others))
    with (
        http.listen("127.0.0.1", 0) as first,
        pytest.raises(MethodError, match="choose another --port"),
    ):
        http.listen("127.0.0.1", first.getsockname()[1])
    with pytest.raises(MethodError, match="no server can listen"):
        http.listen("203.0.113.7", 0)


class Fuzz:
    """Requests that are damaged in many ways, from a seed."""

    def __init__(self, seed: int, port: int) -> None:
        self.random = random.Random(seed)
        self.port = port
        frame = pd.DataFrame([GOOD, GOOD, GOOD | {"c": "b"}])
        table = pa.Table.from_pandas(frame, preserve_index=False)
        categories = frame.assign(c=frame["c"].astype("category"))
        self.streams = [
            stream(table), stream(pa.Table.from_pandas(categories, preserve_index=False))
        ]  # fmt: skip
        self.texts = [
            json.dumps([GOOD, GOOD]).encode(),
            json.dumps({"columns": {"x": [1], "z": [2.5], "c": ["a"]}, "level": 0.5}).encode(),
        ]

    def request(self) -> bytes:
        kind = self.random.choice(["json", "value", "arrow", "head", "bytes"])
        body, form = self.random.choice(self.texts), "application/json"
        if kind == "json":
            body = self.damaged(body)
        elif kind == "value":
            body = json.dumps(self.value(4), ensure_ascii=self.random.random() < 0.5).encode(
                "utf-8", "replace"
            )
        elif kind == "arrow":
            body, form = self.damaged(self.random.choice(self.streams)), ARROW
        lines = [
            "POST /predict HTTP/1.1", f"Host: 127.0.0.1:{self.port}", f"Content-Type: {form}",
            f"Content-Length: {len(body)}", "Connection: close",
        ]  # fmt: skip
        if kind == "head":
            lines[self.random.randrange(4)] = self.random.choice(
                [
                    "GET /predict HTTP/1.1", "POST /x%00%ff?a=%zz HTTP/1.1", "Host: x", "X: \x01",
                    "BREW /health HTTP/1.1", "POST /predict?level=nan HTTP/1.1", "Content-Type:",
                    "Transfer-Encoding: gzip, chunked", "Content-Length: -1", "Accept: \xe9;;q=,",
                    "GET http://evil/health HTTP/1.1", "Content-Length: 5, 5",
                    "Expect: 100-continue", "GET /schema HTTP/1.1", "Upgrade: websocket",
                    "POST * HTTP/9.9",
                ]
            )  # fmt: skip
        data = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        return self.damaged(data) if kind == "bytes" else data

    def damaged(self, data: bytes) -> bytes:
        found = bytearray(data)
        for _ in range(self.random.choice([1, 1, 2, 8])):
            if not found:
                break
            at = self.random.randrange(len(found))
            how = self.random.randrange(5)
            if how == 0:
                found[at] = self.random.randrange(256)
            elif how == 1:
                found[at] ^= 1 << self.random.randrange(8)
            elif how == 2:
                del found[at : at + self.random.randrange(1, 9)]
            elif how == 3:
                found[at:at] = self.random.choice(
                    [b"[", b'"', b"null", b"1e999", b"\xff" * 4, b"\x00" * 8, b"{}", b"\\ud800"]
                )
            else:
                found[at : at + 4] = self.random.choice(
                    [b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00"]
                )
        return bytes(found)

    def value(self, depth: int) -> Any:
        plain = [
            None, True, 0, -1, 1.5, 10**400, -(2**63), 1e308, "", "a", "\ud800", "1,5", "=1+1",
            "nan", "x" * 11_000,
        ]  # fmt: skip
        kind = self.random.randrange(4) if depth else 0
        if kind == 0:
            return self.random.choice(plain)
        if kind == 1:
            return [self.value(depth - 1) for _ in range(self.random.randrange(4))]
        names = ["x", "z", "c", "rows", "columns", "level", "y", "", "\ud800"]
        if kind == 2:
            return {name: self.value(depth - 1) for name in self.random.sample(names, 3)}
        return [{"x": self.value(0), "z": self.value(0), "c": self.value(0)}] * 2


def fuzz(run: tuple[Any, Any], seed: int, count: int) -> dict[str, int]:
    """Every request is answered, with rows or with a typed error; the server goes on."""
    with Server(run, seconds=2.0) as server, ThreadPoolExecutor(16) as pool:
        made = Fuzz(seed, server.port)
        requests = [made.request() for _ in range(count)]
        seen = Counter(pool.map(partial(answered, server), requests))
        assert len(server.predict([GOOD])["rows"]) == 1 and server.batcher.alive
    return seen


def answered(server: Server, data: bytes) -> str:
    """The status of the answer to some bytes, which is JSON or an Arrow stream."""
    found = server.raw(data)
    if not found:  # the head has no end, so that there is no request
        assert b"\r\n\r\n" not in data or data.count(b"\n") < 6, data
        return "none"
    head, _, body = found.partition(b"\r\n\r\n")
    while head.split()[1] == b"100":  # continue
        head, _, body = body.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status != 500 and b"Traceback" not in found, (data, found)
    if status != 200:
        error = json.loads(body)["error"]
        assert error["type"] in ("Refusal", "DataError", "ShapeError") and error["message"], data
    return str(status)


def test_damaged_requests_are_answered_with_typed_errors(run, monkeypatch) -> None:
    monkeypatch.setattr(http, "HEADER_SECONDS", 1.0)
    seen = fuzz(run, seed=1, count=200)
    assert {"200", "400", "422"} <= set(seen), seen


@pytest.mark.slow
@pytest.mark.matrix
def test_5000_damaged_requests(run, monkeypatch) -> None:
    monkeypatch.setattr(http, "HEADER_SECONDS", 1.0)
    seen = fuzz(run, seed=2, count=5000)
    assert sum(seen.values()) == 5000 and len(seen) > 6, seen
