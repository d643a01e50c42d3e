"""Pictures of the studio's rooms for runs and for labels, with runs and sessions made here.

python -m benchmarks.studio_rooms docs/figures      two minutes
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from browser import Browser, find

RUN = "window.doxaStudio && doxaStudio.about && doxaStudio.busy.size === 0"
LABEL = "window.doxaStudio && doxaStudio.found && !doxaStudio.busy"
NOISE = 0.35  # of the classes: some rows cannot be told apart
SENTENCES = {
    "complaint": ["The parcel came late and the box was torn.", "Nobody answers the phone."],
    "praise": ["Quick delivery, thank you very much!", "The lamp is lovely, as described."],
    "question": ["When is the shop open on Sundays?", "Do you ship to Norway?"],
}


def houses(seed: int = 0, rows: int = 400) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    made = pd.DataFrame({
        "rooms": draw.integers(2, 9, rows), "area": draw.normal(90, 25, rows).round(1),
        "city": draw.choice(["Bonn", "Köln", "Trier"], rows),
        "age": draw.uniform(0, 80, rows).round(1),
    })  # fmt: skip
    price = 1.8 * made.area + 22 * made.rooms - 0.9 * made.age + 60 * (made.city == "Köln")
    noise = draw.normal(0, 1, rows) * (10 + 0.3 * made.area)
    size = made.area / 90 + draw.normal(0, NOISE, rows)
    kinds = np.select([size < 0.85, size < 1.15], ["small", "middle"], "large")
    return made.assign(price=(price + noise).round(1), kind=kinds)


def messages(seed: int = 0, rows: int = 300) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    kind = draw.choice(list(SENTENCES), rows)
    text = [str(draw.choice(SENTENCES[one])) for one in kind]
    return pd.DataFrame({
        "message": text, "length": [len(one) + int(draw.integers(0, 30)) for one in text],
        "exclamations": draw.integers(0, 3, rows) + (kind == "praise"),
        "urgency": (draw.normal(0, 1, rows) + 2 * (kind == "complaint")).round(2), "kind": kind,
    })  # fmt: skip


def doxa(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "doxa", *map(str, words)], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def prepare(folder: Path) -> None:
    houses().to_csv(folder / "houses.csv", index=False)
    ensemble = ("--method", "deep-ensemble", "--steps", 400, "--split", 0.25, "--allow-status")
    data = folder / "houses.csv"
    doxa("fit", data, "--target", "price", "--drop", "kind", *ensemble, "--out", folder / "prices")
    doxa("fit", data, "--target", "kind", "--drop", "price", *ensemble, "--out", folder / "kinds")
    pool, session = messages(), folder / "messages"
    truth = pool.kind.copy()
    pool.assign(kind=pool.kind.where(pool.index < 24)).to_csv(folder / "pool.csv", index=False)
    doxa(
        "active", "start", folder / "pool.csv", "--target", "kind", "--drop", "message", "--out",
        session, "--method", "deep-ensemble", "--members", 4, "--steps", 150, "--count", 8,
    )  # fmt: skip
    for _ in range(4):
        doxa("active", "next", session)
        sheet = pd.read_csv(session / "to_label.csv")
        answers = sheet.assign(kind=[truth[line - 2] for line in sheet["line"]])
        answers.to_csv(session / "to_label.csv", index=False)
        doxa("active", "label", session)
    doxa("active", "next", session)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", type=Path, help="the folder of the pictures")
    given = parser.parse_args()
    if find() is None:
        raise SystemExit("there is no Chromium on this machine")
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        prepare(folder)
        server = subprocess.Popen(
            [sys.executable, "-m", "doxa", "studio", "--no-browser", "kinds", "prices", "--table",
             "houses.csv", "--label", "messages"],
            text=True, stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": "300"}, cwd=folder,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            origin = "/".join(address.split("/")[:3])
            with Browser() as browser:
                browser.visit(address)
                browser.wait(RUN, 300)
                second = browser.evaluate("location.href")
                for page, ready, name, height in (
                    (second, RUN, "run", 1500), (f"{origin}/label", LABEL, "label", 800),
                ):  # fmt: skip
                    for look, width, tall, dark in (
                        ("", 1240, height, False), ("_dark", 1240, height, True),
                        ("_phone", 390, 844, False),
                    ):  # fmt: skip
                        browser.visit(page, width, tall, dark)
                        browser.wait(ready, 120)
                        browser.settle(0.6)
                        file = given.pictures / f"studio_{name}{look}.png"
                        browser.screenshot(file, whole=False)
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


if __name__ == "__main__":
    main()
