"""`doxa serve`: what it answers, in one thread, in batches, to the bit, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shell import doxa, started

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")

from served import SECONDS, Gated, Server  # noqa: E402

from doxa.app.fitting import load_run  # noqa: E402
from doxa.app.serve import ARROW  # noqa: E402
from doxa.app.serve.batching import depends_on_company  # noqa: E402
from doxa.tables.predictions import predict_frame  # noqa: E402

JSON = {"Content-Type": "application/json"}


def table(n: int, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(5, 2, size=n)})
    frame["c"] = rng.choice(["a", "b"], n)
    return frame


def fitted(folder: Path, *words: object, classes: bool = False) -> Path:
    frame = table(150, seed=0)
    frame["y"] = 2 * frame["x"] - frame["z"] + np.random.default_rng(3).normal(0, 0.3, 150)
    if classes:
        frame["y"] = np.where(frame["y"] > -5, "high", "low")
    frame.to_csv(folder / "train.csv", index=False)
    doxa("fit", folder / "train.csv", "-t", "y", "-o", folder / "run", "--allow-status", *words)
    return folder / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A network in float32 that is wide enough for products that depend on the batch."""
    return fitted(
        tmp_path_factory.mktemp("run"), "-m", "deep-ensemble", "--members", 3, "--steps", 30,
        "--hidden", "64,64", "--lr", 0.01, "--validation", 0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(folder) -> tuple[Any, Any]:
    return load_run(folder)


@pytest.fixture(scope="module")
def server(run):
    with Server(run) as made:
        yield made


def rows_of(frame: Any) -> list[dict[str, Any]]:
    return frame.to_dict("records")


def expected(run: tuple[Any, Any], frame: Any, level: float | None = None) -> Any:
    return predict_frame(*run, frame, level)[0]


def test_rows_and_columns_are_those_of_predict(run, server) -> None:
    frame = table(7)
    one = server.predict(rows_of(frame))
    other = server.predict({"rows": rows_of(frame)[::-1]})
    third = server.predict({"columns": {name: frame[name].tolist() for name in frame}})
    found = pd.DataFrame(one["rows"])
    pd.testing.assert_frame_equal(found, expected(run, frame), rtol=1e-5)
    pd.testing.assert_frame_equal(pd.DataFrame(other["rows"])[::-1].reset_index(drop=True), found,
                                  rtol=1e-5)  # fmt: skip
    assert pd.DataFrame(third["columns"]).equals(found) and one["notes"] == []


def test_a_level_of_the_body_or_of_the_query(run, server) -> None:
    frame = table(3)
    body = json.dumps({"rows": rows_of(frame)}).encode()
    status, _, by_query = server.ask("POST", "/predict?level=0.5", body, JSON)
    assert status == 200
    found = server.predict({"rows": rows_of(frame), "level": 0.5})
    assert found == json.loads(by_query)
    want = expected(run, frame, 0.5)
    np.testing.assert_allclose([row["low"] for row in found["rows"]], want["low"], rtol=1e-5)
    wide = server.predict(rows_of(frame))["rows"]
    assert all(a["low"] < b["low"] for a, b in zip(wide, found["rows"], strict=True))


def test_classes_have_their_labels_and_sets(tmp_path) -> None:
    run = load_run(fitted(tmp_path, "-m", "map", "--steps", 50, classes=True))
    frame = table(5)
    with Server(run) as server:
        found = server.predict({"rows": rows_of(frame), "level": 0.9})["rows"]
        plain = server.predict(rows_of(frame))["rows"]
        described = json.loads(server.ask("GET", "/schema")[2])
    want = expected(run, frame, 0.9)
    assert list(found[0]) == list(want.columns) and "set" in found[0] and "set" not in plain[0]
    assert [row["predicted"] for row in found] == want["predicted"].tolist()
    assert described["target"]["classes"] == ["high", "low"]


def arrow(frame: Any, **options: Any) -> bytes:
    given = pa.Table.from_pandas(frame, preserve_index=False)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, given.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        stream.write_table(given, max_chunksize=2)
    return sink.getvalue()


def test_arrow_and_json_say_the_same(run, server) -> None:
    frame = table(5)
    frame["c"] = frame["c"].astype("category")
    body = arrow(frame.assign(more=1))
    status, headers, content = server.ask("POST", "/predict", body, {"Content-Type": ARROW})
    assert (status, headers["content-type"]) == (200, ARROW)
    with pa.ipc.open_stream(content) as stream:
        found = stream.read_all()
    pd.testing.assert_frame_equal(
        found.to_pandas(), expected(run, table(5)), check_dtype=False, rtol=1e-5
    )
    assert json.loads(found.schema.metadata[b"doxa.notes"])[0].endswith("not used: 'more'")
    both = {"Content-Type": ARROW, "Accept": "application/json"}
    status, headers, content = server.ask("POST", "/predict?level=0.5", body, both)
    assert headers["content-type"] == "application/json"
    np.testing.assert_allclose(
        [row["high"] for row in json.loads(content)["rows"]],
        expected(run, table(5), 0.5)["high"], rtol=1e-5,
    )  # fmt: skip
    status, headers, _ = server.ask(
        "POST", "/predict", json.dumps(rows_of(table(2))), JSON | {"Accept": ARROW}
    )
    assert (status, headers["content-type"]) == (200, ARROW)


def test_the_index_of_the_fit_names_rows(tmp_path) -> None:
    frame = table(60, 0).assign(y=1.0 * np.arange(60), who=[f"k{i}" for i in range(60)])
    frame.to_csv(tmp_path / "t.csv", index=False)
    doxa("fit", tmp_path / "t.csv", "-t", "y", "-m", "linear", "--index", "who",
         "-o", tmp_path / "run", "--allow-status")  # fmt: skip
    rows = rows_of(frame.drop(columns="y")[:3])
    with Server(load_run(tmp_path / "run")) as server:
        assert [row["who"] for row in server.predict(rows)["rows"]] == ["k0", "k1", "k2"]
        rows[1]["x"] = "oops"
        wrong = server.predict(rows, 422)["error"]
        body = arrow(pd.DataFrame(rows[:1]))
        _, _, content = server.ask("POST", "/predict", body, {"Content-Type": ARROW})
        assert pa.ipc.open_stream(content).read_all()["who"].to_pylist() == ["k0"]
    assert "column 'x', row 'k1': 'oops' is not a number" in wrong["message"]


GOOD = {"x": 1.0, "z": 2.0, "c": "a"}


@pytest.mark.parametrize(
    ("body", "status", "wrong"),
    [
        ([GOOD, GOOD | {"x": "oops"}], 422, "column 'x', row 1: 'oops' is not a number"),
        ([GOOD, GOOD | {"z": None}], 422, "column 'z', row 1"),
        ([GOOD | {"z": [1]}], 422, "column 'z', row 0: a list is no cell"),
        ([{"x": 1.0, "c": "a"}], 422, "no column 'z'"),
        ([GOOD, 3], 422, "row 1 is no object"),
        ([], 422, "no column"),
        ({"columns": {"x": [], "z": [], "c": []}}, 422, "no rows"),
        ({"columns": {"x": [1], "z": [1, 2], "c": ["a"]}}, 422, "1 to 2 rows"),
        ({"columns": {"x": 1}}, 422, "column 'x' is no list"),
        ({"rows": [GOOD], "columns": {}}, 400, "rows or columns"),
        ({"rows": [GOOD], "epochs": 3}, 400, "the JSON has 'epochs'"),
        ({"rows": [GOOD], "level": 2}, 422, "level is a number between 0 and 1"),
        (3, 400, "a list of objects"),
        (b"", 400, "no JSON"),
        (b'[{"x": NaN}]', 400, "NaN is no number"),
        (b'[{"x": 1, "x": 2}]', 400, "'x' stands more than once"),
        (b'[{"x": 1e999, "z": 1, "c": "a"}]', 422, "not finite"),
        (b"[{]", 400, "brackets do not match"),
        (b"\xff\xfe", 400, "not UTF-8"),
    ],
)  # fmt: skip
def test_a_mistake_in_json_is_named(server, body, status, wrong) -> None:
    found = server.predict(body, status)["error"]
    assert wrong in found["message"]
    assert found["type"] == ("DataError" if status == 422 else "Refusal")


def test_a_mistake_in_arrow_is_named(server) -> None:
    frame = table(3)
    holes = frame.assign(z=[1.0, None, 2.0])
    cases = [
        (arrow(holes), 422, "column 'z', row 1"),
        (arrow(frame.assign(x=[[1], [2], [3]])), 422, "column 'x' holds list"),
        (arrow(frame.drop(columns="c")), 422, "no column 'c'"),
        (arrow(frame[:0]), 422, "no rows"),
        (arrow(frame.assign(c="a" * 20_000)), 422, "column 'c' has text of 20,000 bytes"),
        (arrow(frame)[:-40], 400, "no Arrow stream"),
        (arrow(frame)[:-8], 400, "it has no end"),
        (b"hello", 400, "no Arrow stream"),
        (b"", 400, "no Arrow stream"),
        (arrow(frame, compression="zstd"), 422, "is compressed"),
        (arrow(frame.astype({"c": "category"}), compression="lz4"), 422, "is compressed"),
    ]
    for body, status, wrong in cases:
        found, _, content = server.ask("POST", "/predict", body, {"Content-Type": ARROW})
        assert (found, wrong in json.loads(content)["error"]["message"]) == (status, True), content


def test_health_and_schema(run, server) -> None:
    status, headers, content = server.ask("GET", "/health")
    found = json.loads(content)
    assert status == 200 and found["ready"] and found["name"] == "name"
    assert found["status"] == str(run[0].status) and found["method"] == "deep-ensemble"
    assert headers["cache-control"] == "no-store"
    found = json.loads(server.ask("GET", "/schema")[2])
    assert [column["name"] for column in found["columns"]] == ["x", "z", "c"]
    assert found["columns"][2]["categories"] == ["a", "b"] and found["target"]["name"] == "y"
    assert found["prediction"] == list(expected(run, table(1)).columns)


def bits(answer: Any) -> list[bytes]:
    return [np.array([*row.values()]).tobytes() for row in answer["rows"]]


def asked_together(server: Server, gated: Gated, bodies: list[Any]) -> list[Any]:
    """The answers to requests that are all in the queue before the first is predicted."""
    gated.close()
    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        first = pool.submit(server.predict, [GOOD])
        assert gated.entered.wait(SECONDS)
        others = [pool.submit(server.predict, body) for body in bodies]
        wait_for(lambda: server.batcher.waiting == len(bodies))
        gated.gate.set()
        first.result(SECONDS)
        return [other.result(SECONDS) for other in others]


def wait_for(condition: Any) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.005)


def sizes(n: int) -> list[Any]:
    """Requests of one to five rows."""
    frame = table(3 * n, seed=4)
    ends = np.cumsum([1 + k % 5 for k in range(n)])
    return [rows_of(frame[end - 1 - k % 5 : end]) for k, end in enumerate(ends)]


def test_requests_that_wait_are_predicted_together(run) -> None:
    """And each gets its own rows. What differs from an answer alone is rounding."""
    gated, bodies = Gated(run[0]), sizes(12)
    with Server(run, posterior=gated) as server:
        together = asked_together(server, gated, bodies)
        assert gated.rows == [1, sum(map(len, bodies))] and server.batcher.batches == 2
        alone = [server.predict(body) for body in bodies]
        assert server.batcher.batches == 2 + len(bodies)
    for one, other in zip(together, alone, strict=True):
        pd.testing.assert_frame_equal(
            pd.DataFrame(one["rows"]), pd.DataFrame(other["rows"]), rtol=1e-4, atol=1e-5
        )
    # without this, the test of --exact would show nothing
    assert [bits(a) for a in together] != [bits(a) for a in alone]


def test_exact_answers_have_the_bits_of_single_ones(run) -> None:
    """The bits of an answer alone, and those of `doxa predict`."""
    gated, bodies = Gated(run[0]), sizes(12)
    with Server(run, posterior=gated, exact=True) as server:
        together = asked_together(server, gated, bodies)
        assert gated.rows[0] == 1 and sorted(gated.rows[1:]) == sorted(map(len, bodies))
        alone = [server.predict(body) for body in bodies]
    assert [bits(a) for a in together] == [bits(a) for a in alone]
    for body, answer in zip(bodies, alone, strict=True):
        want = expected(run, pd.DataFrame(body))
        assert bits(answer) == [row.tobytes() for row in want.to_numpy()]


def test_requests_of_other_levels_do_not_mix(run) -> None:
    gated, frame = Gated(run[0]), table(2)
    bodies = [{"rows": rows_of(frame), "level": level} for level in (0.5, None, 0.9, 0.5)]
    with Server(run, posterior=gated) as server:
        found = asked_together(server, gated, bodies)
        assert gated.rows == [1, 2, 4, 2]
    for body, answer in zip(bodies, found, strict=True):
        want = expected(run, frame, body["level"])["low"]
        np.testing.assert_allclose([row["low"] for row in answer["rows"]], want, rtol=1e-5)


def test_the_fault_of_one_request_is_not_that_of_others(run, caplog) -> None:
    """And an error that is no mistake of the client shows nothing of itself."""
    gated = Gated(run[0])
    with Server(run, posterior=gated) as server:
        gated.close()
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(server.predict, [GOOD])
            assert gated.entered.wait(SECONDS)
            good = pool.submit(server.predict, [GOOD])
            bad = pool.submit(server.predict, [GOOD | {"x": 666.0}], 500)
            wrong = pool.submit(server.predict, [GOOD | {"x": "a"}], 422)
            wait_for(lambda: server.batcher.waiting == 3)
            gated.gate.set()
            assert first.result(SECONDS)["rows"][0].keys() == good.result(SECONDS)["rows"][0].keys()
            assert "column 'x'" in wrong.result(SECONDS)["error"]["message"]
            error = bad.result(SECONDS)["error"]
    assert error["type"] == "InternalError" and "secret" not in error["message"]
    assert error["message"].split()[-1] in caplog.text and "secret" in caplog.text


def test_a_posterior_that_draws_jointly_is_not_batched(run) -> None:
    """Its predictions of a row depend on the rows beside it."""
    rng = np.random.default_rng(0)

    class Joint(Gated):
        def predict(self, x: Any) -> Any:
            p = self._posterior.predict(x)
            moved = p.mean + 0.3 * np.float32(rng.normal()) * p.std
            return SimpleNamespace(
                mean=moved, std=p.std, aleatoric=p.aleatoric, epistemic=p.epistemic,
                interval=p.interval,
            )  # fmt: skip

    assert depends_on_company(Joint(run[0]), run[1])
    assert not depends_on_company(*run)
    with Server(run, posterior=Joint(run[0])) as server:
        assert server.batcher.exact


def test_what_has_begun_is_finished_when_the_server_stops(run) -> None:
    gated = Gated(run[0])
    with ThreadPoolExecutor(3) as pool, Server(run, posterior=gated) as server:
        gated.close()
        first = pool.submit(server.predict, [GOOD])
        assert gated.entered.wait(SECONDS)
        second = pool.submit(server.predict, [GOOD])
        wait_for(lambda: server.batcher.waiting == 1)
        server.stop.set()

        def refused() -> bool:
            try:
                server.ask("GET", "/health")
            except (OSError, http.client.HTTPException):
                return True
            return False

        wait_for(refused)
        assert not first.done()
        gated.gate.set()
        assert len(first.result(SECONDS)["rows"]) == len(second.result(SECONDS)["rows"]) == 1


def test_a_server_that_stops_waits_no_longer_than_it_may(run) -> None:
    gated = Gated(run[0])
    with (
        ThreadPoolExecutor(1) as pool,
        Server(run, posterior=gated, drain=1, seconds=600) as server,
    ):
        gated.close()
        first = pool.submit(server.ask, "POST", "/predict", json.dumps([GOOD]), JSON)
        assert gated.entered.wait(SECONDS)
        server.stop.set()
        server.thread.join(SECONDS)
        assert not server.thread.is_alive()
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert first.result(SECONDS)[0] >= 500
        gated.gate.set()


def served_process(folder: Path, log: Path, *words: object) -> tuple[subprocess.Popen[bytes], int]:
    process = started("serve", folder, "--port", 0, *words, log=log)
    try:
        wait_for(lambda: "served at" in log.read_text() or process.poll() is not None)
        port = int(re.findall(r"served at http://[\d.]+:(\d+)", log.read_text())[0])
    except BaseException:
        process.kill()
        raise
    return process, port


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_sigterm_ends_the_command_with_0(folder, tmp_path, jobs) -> None:
    """While clients are asking: every answer that was begun arrives."""
    process, port = served_process(folder, tmp_path / "log", "--jobs", jobs)
    answers: list[int] = []

    def ask() -> None:
        with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
            while True:
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
                client.request("POST", "/predict", json.dumps([GOOD] * 500), JSON)
                try:
                    answer = client.getresponse()
                except http.client.RemoteDisconnected:  # it was not accepted
                    return
                assert len(json.loads(answer.read())["rows"]) == 500
                answers.append(answer.status)
                client.close()

    try:
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(answers) > 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, (tmp_path / "log").read_text()
        for thread in threads:
            thread.join(SECONDS)
        assert set(answers) == {200} and "the server has ended" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait(SECONDS)


@pytest.mark.slow
def test_the_children_of_a_server_that_is_killed_end(folder, tmp_path) -> None:
    process, port = served_process(folder, tmp_path / "log", "--jobs", 2)
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    client.request("GET", "/health")
    assert client.getresponse().status == 200
    process.kill()
    process.wait(SECONDS)

    def gone() -> bool:
        try:
            http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()
        except OSError:
            return True
        return False

    wait_for(gone)


@pytest.mark.slow
def test_another_address_has_a_warning_and_asks_for_the_token(
    folder, tmp_path, monkeypatch
) -> None:
    """The token is in the environment, and no name of a host is asked for."""
    monkeypatch.setenv("DOXA_TOKEN", "a-token-of-enough-characters")
    process, port = served_process(folder, tmp_path / "log", "--host", "0.0.0.0")
    try:
        assert "there is no TLS" in " ".join((tmp_path / "log").read_text().split())
        for given, status in (("", 401), ("Bearer a-token-of-enough-characters", 200)):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
            client.request("GET", "/schema", headers={"Host": "any", "Authorization": given})
            assert client.getresponse().status == status
            client.close()
        assert b"enough" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait(SECONDS)


def test_a_token_is_needed_off_the_loopback_address(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("DOXA_TOKEN", raising=False)
    assert "needs a token" in doxa("serve", folder, "--host", "0.0.0.0", code=2)
    said = doxa("serve", folder, "--token", "short", code=2)
    assert "at least 16 characters" in said
    monkeypatch.setenv("DOXA_TOKEN", "too short")
    assert "at least 16 characters" in doxa("serve", folder, code=2)
    assert "no run" in doxa("serve", tmp_path, "--token", "x" * 16, "--port", 0, code=2)
    assert os.environ["DOXA_TOKEN"] == "too short"
