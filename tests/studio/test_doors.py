"""Who may come into the studio: each rule, by a request that breaks it alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from doxa.studio.doors import EXCHANGE, LARGEST_BODY, POLICY, Doors

PORT = 8765
HOST = f"127.0.0.1:{PORT}"
PUBLIC = ("/pages/enter.js",)
Headers = dict[str, str]
OK: Headers = {"host": HOST, "sec-fetch-site": "same-origin"}
ORIGIN: Headers = {"origin": f"http://{HOST}"}


class Inside:
    """The application behind the doors, which records what reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        own = [(b"cache-control", b"max-age=60"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": own})
        await send({"type": "http.response.body", "body": b"inside"})


def doors(*hosts: str) -> tuple[Doors, Inside]:
    inside = Inside()
    return Doors(inside, PORT, hosts, PUBLIC, token="the token"), inside


Sent = list[dict[str, Any]]


def run(call: Callable[[Any, Any], Awaitable[None]], body: bytes = b"") -> Sent:
    sent: Sent = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return waiting.pop()

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def main() -> None:
        await call(receive, send)

    asyncio.run(main())
    return sent


def lines(headers: Headers | list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    pairs = headers.items() if isinstance(headers, dict) else headers
    return [(name.encode(), value.encode()) for name, value in pairs]


def request(
    door: Doors,
    path: str,
    headers: Headers | list[tuple[str, str]],
    method: str = "GET",
    body: bytes = b"",
    query: bytes = b"",
) -> tuple[int, dict[str, str], bytes]:
    scope = {
        "type": "http", "path": path, "method": method, "headers": lines(headers),
        "query_string": query,
    }  # fmt: skip
    start, *rest = run(lambda receive, send: door(scope, receive, send), body)
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    assert len(found) == len(start["headers"])  # no header is there twice
    return start["status"], found, b"".join(part["body"] for part in rest)


def websocket(door: Doors, headers: Headers | list[tuple[str, str]]) -> str:
    scope = {"type": "websocket", "path": "/ws", "headers": lines(headers), "query_string": b""}

    async def call(receive: Any, send: Any) -> None:
        async def connect() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        await door(scope, connect, send)

    return str(run(call)[0]["type"])


def enter(door: Doors, token: Any = "the token", **changes: str) -> tuple[int, Headers]:
    body = json.dumps({"token": token}).encode()
    status, headers, _ = request(door, EXCHANGE, {**OK, **ORIGIN, **changes}, "POST", body)
    return status, headers


def session(door: Doors) -> Headers:
    cookie = enter(door)[1]["set-cookie"]
    return {"cookie": cookie.partition(";")[0]}


def test_the_token_is_exchanged_once_for_a_session() -> None:
    door, inside = doors()
    assert request(door, "/data", OK)[0] == 401
    cookie = session(door)
    assert request(door, "/data", OK | cookie)[0] == 200
    assert inside.reached == ["/data"]
    assert enter(door)[0] == 403  # a second browser, with the same address
    again = request(
        door, EXCHANGE, OK | ORIGIN | cookie, "POST", json.dumps({"token": "the token"}).encode()
    )
    assert again[0] == 200  # the same browser
    assert "set-cookie" not in again[1]


def test_the_cookie_has_the_port_and_only_this_server_reads_it() -> None:
    cookie = enter(doors()[0])[1]["set-cookie"]
    name, *rest = cookie.partition("=")[0], *(part.strip() for part in cookie.split(";")[1:])
    assert name == f"doxa_studio_{PORT}"
    assert set(rest) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert "token" not in cookie
    assert len(cookie.partition("=")[2].partition(";")[0]) >= 40


@pytest.mark.parametrize(
    "token", ["", "the toke", "the token ", None, 1, ["the token"], "\ud800", {"a": 1}]
)
def test_another_token_opens_nothing(token: Any) -> None:
    door, _ = doors()
    status, headers = enter(door, token)
    assert status == 403
    assert "set-cookie" not in headers
    assert enter(door)[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 4000])
def test_a_body_that_is_no_token_opens_nothing(body: bytes) -> None:
    assert request(doors()[0], EXCHANGE, OK | ORIGIN, "POST", body)[0] == 403


def test_a_large_body_is_not_read() -> None:
    assert request(doors()[0], EXCHANGE, OK | ORIGIN, "POST", b" " * (LARGEST_BODY + 1))[0] == 413


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost:8765", "127.0.0.1:8766", "evil.example:8765", "127.0.0.1:8765.evil",
     "", "127.0.0.1:08765"],
)  # fmt: skip
def test_another_host_is_refused(host: str) -> None:
    """With a session, too: a name that resolves to this machine is another site (DNS rebinding)."""
    door, inside = doors()
    cookie = session(door)
    origin = {"origin": f"http://{host}"}
    for path in ("/", "/data", "/pages/enter.js"):
        assert request(door, path, OK | cookie | {"host": host})[0] == 421
    assert websocket(door, OK | cookie | {"host": host} | origin) == "websocket.close"
    assert enter(doors()[0], host=host, **origin)[0] == 421
    assert inside.reached == []


def test_no_host_and_two_hosts_are_refused() -> None:
    door, _ = doors()
    cookie = session(door)
    assert request(door, "/data", cookie)[0] == 421
    two = [("host", HOST), ("host", HOST), *cookie.items()]
    assert request(door, "/data", two)[0] == 400


def test_a_host_of_a_tunnel_is_allowed_by_name() -> None:
    door, _ = doors("tunnel.example:443")
    cookie = session(door)
    there = {"host": "tunnel.example:443"} | cookie
    assert request(door, "/data", there)[0] == 200
    for origin in ("http://tunnel.example:443", "https://tunnel.example:443"):
        assert websocket(door, there | {"origin": origin}) == "websocket.accept"
    assert websocket(door, there | ORIGIN) == "websocket.close"  # of another of its names
    assert websocket(door, OK | cookie | {"origin": f"https://{HOST}"}) == "websocket.close"


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", f"https://{HOST}", "http://127.0.0.1:8766",
               f"http://{HOST}/", f"http://{HOST}.evil.example"],
)  # fmt: skip
def test_another_origin_is_refused_on_websockets_and_writes(origin: str | None) -> None:
    door, inside = doors()
    cookie = session(door)
    own = {} if origin is None else {"origin": origin}
    assert websocket(door, OK | cookie | own) == "websocket.close"
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert request(door, "/data", OK | cookie | own, method)[0] == 403
    assert inside.reached == []
    assert websocket(door, OK | cookie | ORIGIN) == "websocket.accept"
    assert request(door, "/data", OK | cookie | ORIGIN, "POST")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "weird"])
def test_data_is_not_for_pages_of_other_sites(site: str) -> None:
    door, inside = doors()
    cookie = session(door)
    from_there = {"host": HOST, "sec-fetch-site": site}
    assert request(door, "/data", from_there | cookie)[0] == 403
    assert request(door, "/pages/enter.js", from_there | cookie)[0] == 403
    assert websocket(door, from_there | cookie | ORIGIN) == "websocket.close"
    assert inside.reached == []
    for fine in ("same-origin", "none"):
        assert request(door, "/data", {"host": HOST, "sec-fetch-site": fine} | cookie)[0] == 200


def test_a_link_of_another_site_opens_the_page_only() -> None:
    door, inside = doors()
    cookie = session(door)
    assert request(door, "/", {"host": HOST, "sec-fetch-site": "cross-site"} | cookie)[0] == 200
    posted = {"host": HOST, "sec-fetch-site": "cross-site"} | ORIGIN | cookie
    assert request(door, "/", posted, "POST")[0] == 403
    assert inside.reached == ["/"]


def test_a_websocket_needs_the_session_before_it_is_accepted() -> None:
    door, inside = doors()
    assert websocket(door, OK | ORIGIN) == "websocket.close"
    cookie = session(door)
    wrong = {"cookie": f"doxa_studio_{PORT}=" + "a" * 43}
    other = {"cookie": cookie["cookie"].replace(str(PORT), "8766")}
    for header in (wrong, other, {"cookie": ""}, {"cookie": "=;;="}):
        assert websocket(door, OK | ORIGIN | header) == "websocket.close"
        assert request(door, "/data", OK | header)[0] == 401
    assert inside.reached == []
    both = {"cookie": f"{wrong['cookie']}; {cookie['cookie']}"}
    assert websocket(door, OK | ORIGIN | both) == "websocket.accept"


def test_the_page_of_the_address_with_the_token_replaces_it() -> None:
    """With a session, too: else the token would stay in the history."""
    door, inside = doors()
    assert request(door, "/", OK)[0] == 200
    assert request(door, "/", OK | session(door), query=b"token=x")[0] == 200
    assert inside.reached == [EXCHANGE, EXCHANGE]


def test_every_answer_has_the_headers() -> None:
    door, _ = doors()
    answers = [
        request(door, "/", OK), request(door, "/data", OK), request(door, "/", {"host": "x"}),
        request(door, "/data", OK | session(door)),
        request(door, EXCHANGE, OK | ORIGIN, "POST", b"{}"),
    ]  # fmt: skip
    assert [status for status, _, _ in answers] == [200, 401, 421, 200, 403]
    for _, headers, _ in answers:
        assert headers["content-security-policy"] == POLICY
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"  # not the one of the application
        assert headers["x-content-type-options"] == "nosniff"


def test_the_policy_is_the_agreed_one() -> None:
    assert POLICY == (
        "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
        "style-src 'self'; frame-ancestors 'none'"
    )


def test_tokens_and_sessions_are_random() -> None:
    found = {Doors(Inside(), PORT).token for _ in range(20)}
    assert len(found) == 20
    assert min(len(token or "") for token in found) >= 40
    assert session(doors()[0]) != session(doors()[0])
