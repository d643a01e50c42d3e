"""The room of classes: its numbers are the library's, its boundaries are where decisions change,
and its requests are checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import doxa
from doxa.errors import DoxaError
from doxa.studio import classification, recipes, workers
from doxa.studio.classification import COLUMNS, DRAWS, ROWS, ClassRecipe, boundaries, panel
from doxa.studio.forms import is_exact, methods_for

POINTS = [[-2.0, -0.7, 0], [-1.3, -1.1, 0], [-0.4, 0.6, 1], [0.9, 0.8, 0], [1.4, 1.2, 1],
          [2.2, -0.6, 1], [2.5, 0.3, 1], [-2.1, 0.4, 0]]  # fmt: skip
METHODS = [row.name for row in methods_for("classification")]
EXACT = [name for name in METHODS if is_exact(name)]
MAPS = ("entropy", "aleatoric", "epistemic")


class Call:
    """A call that is never cancelled, and what it showed."""

    number, cancelled = 1, False

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def show(self, content: Any) -> None:
        self.shown.append(content)

    def check(self) -> None:
        pass


def asked(method: str, **changes: Any) -> dict[str, Any]:
    return {"points": POINTS, "method": method, "settings": {}, "width": 6} | changes


def check_numbers(request: dict[str, Any]) -> list[Any]:
    """The numbers of a panel are those of the script that it shows, to the bit."""
    call = Call()
    found = json.loads(json.dumps(workers.finite(panel(request, call)), allow_nan=False))
    script: dict[str, Any] = {}
    exec(compile(found["python"], "shown", "exec"), script)
    across, up = script["across"], script["up"]
    assert (found["x"], found["y"]) == (across.tolist(), up.tolist())
    if not request["points"]:
        assert found["draws"] == [boundaries(f, across, up) for f in script["prior"]]
        return call.shown
    assert found["probability"] == script["probability"].T.tolist()
    for name in MAPS:
        assert found[name] == script[name].tolist()
    assert found["boundary"] == boundaries(script["probability"], across, up)
    assert found["draws"] == [boundaries(f, across, up) for f in script["draws"]]
    assert found["status"] == script["posterior"].status
    assert found["reason"] == script["posterior"].status.reason
    return call.shown


@pytest.mark.parametrize("name", EXACT)
def test_numbers_of_exact_methods_are_the_librarys(name: str) -> None:
    assert EXACT == ["nngp", "ntk"]
    assert check_numbers(asked(name)) == []
    check_numbers(asked(name, points=[], classes=3))


@pytest.mark.parametrize("name", ["map", "laplace", "deep-ensemble"])
def test_numbers_of_trained_methods_are_the_librarys(name: str) -> None:
    points = [*POINTS, [0.0, -2.0, 2]]
    shown = check_numbers(asked(name, points=points, classes=3, steps=60, seed=3, prior=2.0))
    assert shown and all(one["preview"] for one in shown)
    check_numbers(asked(name, points=[]))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in METHODS if name not in EXACT])
def test_numbers_of_every_method_are_the_librarys(name: str) -> None:
    settings = {"rank": 2} if name == "swag" else dict(doxa.methods()[name].short)
    if "inducing" in settings:
        settings["inducing"] = 5  # of the few points
    steps = None if "draws" in settings else 60
    check_numbers(asked(name, settings=settings, steps=steps, activation="relu", depth=2))


def test_the_parts_add_up_to_the_entropy() -> None:
    found = panel(asked("nngp"), Call())
    entropy, aleatoric, epistemic = (torch.tensor(found[name]) for name in MAPS)
    torch.testing.assert_close(aleatoric + epistemic, entropy)
    p = torch.tensor(found["probability"])
    torch.testing.assert_close(entropy, -torch.special.xlogy(p, p).sum(0), rtol=1e-4, atol=1e-5)


def test_the_last_picture_is_the_fits_and_the_first_are_labelled(monkeypatch) -> None:
    monkeypatch.setattr(recipes, "_PAUSE", 0.0)
    monkeypatch.setattr(recipes.time, "monotonic", lambda: 0.0)
    recipes._posteriors.clear()
    call = Call()
    last = panel(asked("mean-field", steps=40), call)
    assert [(one["steps"], one["of"]) for one in call.shown][:2] == [(10, 40), (20, 40)]
    recipe = ClassRecipe.read(asked("mean-field", steps=40))
    plain = recipe.fit().predict(recipe.grid)
    assert last["probability"] == plain.probs.T.tolist() != call.shown[0]["probability"]
    assert last["epistemic"] == plain.mutual_information.tolist()


def test_ambiguity_and_distance_are_told_apart() -> None:
    """Where classes overlap the entropy is aleatoric; far from all points it is epistemic."""
    presets = classification.presets()
    found = {
        name: panel(
            {"method": "nngp", "settings": {}, **presets[name]}, Call()
        ) for name in ("overlap", "far")
    }  # fmt: skip
    overlap, far = found["overlap"]["ambiguity"], found["far"]["ambiguity"]
    assert overlap["aleatoric"][0] > 5 * overlap["epistemic"][0]
    assert far["epistemic"][-1] > 5 * far["aleatoric"][-1]
    assert far["epistemic"][-1] > 5 * far["epistemic"][0]
    for name, one in found.items():
        x = torch.tensor(presets[name]["points"], dtype=torch.float64)[:, :2]
        at = one["ambiguity"]["most"]["unknown"]
        place = torch.tensor([one["x"][at["at"] % COLUMNS], one["y"][at["at"] // COLUMNS]])
        assert at["distance"] == pytest.approx(float((x - place).norm(dim=1).min()), rel=1e-6)
        assert one["epistemic"][at["at"]] == max(one["epistemic"])


def axes() -> tuple[torch.Tensor, torch.Tensor]:
    recipe = ClassRecipe.read(asked("map"))
    return recipe.axes


def crossings(decision: torch.Tensor) -> set[tuple[int, int]]:
    """The cells whose corners have different decisions [ROWS, COLUMNS]."""
    corners = torch.stack(
        [decision[:-1, :-1], decision[1:, :-1], decision[:-1, 1:], decision[1:, 1:]]
    )
    return {(i, j) for j, i in (corners.amax(0) != corners.amin(0)).nonzero().tolist()}


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_boundaries_are_where_the_decision_changes(classes: int) -> None:
    """At both ends of a piece two outputs are equal and largest, by linear interpolation. The cells
    with a piece are those whose corners are decided differently."""
    across, up = axes()
    net = torch.nn.Sequential(
        torch.nn.Linear(2, 12), torch.nn.Tanh(), torch.nn.Linear(12, classes)
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(classes)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(1.5 * torch.randn(parameter.shape, generator=generator))
        f = net(ClassRecipe.read(asked("map")).grid)
    outputs = f.reshape(ROWS, COLUMNS, classes)
    dx, dy = float(across[1] - across[0]), float(up[1] - up[0])
    cells = set()
    pieces = boundaries(f, across, up)
    assert len(pieces) > 20
    scale = float(f.abs().amax())
    for x0, y0, x1, y1 in pieces:
        middle = ((x0 + x1) / 2, (y0 + y1) / 2)
        i = int((middle[0] - float(across[0])) // dx)
        j = int((middle[1] - float(up[0])) // dy)
        cells.add((i, j))
        for x, y in ((x0, y0), (x1, y1)):
            u, v = (x - float(across[i])) / dx, (y - float(up[j])) / dy
            assert min(u, 1 - u, v, 1 - v) == pytest.approx(0.0, abs=2e-3)  # on a side
            weights = [(1 - u) * (1 - v), u * (1 - v), (1 - u) * v, u * v]
            places = [(j, i), (j, i + 1), (j + 1, i), (j + 1, i + 1)]
            here = sum(w * outputs[place] for w, place in zip(weights, places, strict=True))
            if classes == 2:
                assert abs(float(here[0] - here[1])) < 2e-3 * scale
    assert crossings(outputs.argmax(2)) == cells


def test_a_saddle_has_two_pieces_that_do_not_cross() -> None:
    """With signs + − + − around a cell, the mean of the corners decides which are together."""
    square = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for last, alone in ((3.0, "negative"), (0.5, "positive")):
        f = torch.zeros(4, 2, dtype=torch.float64)
        f[:, 0] = torch.tensor([last, -1.0, -1.0, last])  # rows: (0, 0), (1, 0), (0, 1), (1, 1)
        pieces = boundaries(f, square, square)
        assert len(pieces) == 2
        for x0, y0, x1, y1 in pieces:
            near = [(x0 + x1) / 2 > 0.5, (y0 + y1) / 2 > 0.5]
            assert (near[0] == near[1]) is (alone == "positive")


WRONG: list[tuple[Any, str]] = [
    (None, "object"), ({}, "no method"), ({"method": "map"}, "points"), (asked("gp"), "no method"),
    (asked("map", points=[[1, 2]]), "point 0"), (asked("map", points=[[1, 2, 0.5]]), "class"),
    (asked("map", points=[[1, 2, 2]]), "from 0 to 1"), (asked("map", points=[[1, 2, -1]]), "class"),
    (asked("map", points=[[1, None, 0]]), "point 0"), (asked("map", points=[[1, 1e7, 0]]), "size"),
    (asked("map", points=[[0, 0, 0]] * 301), "at most 300"), (asked("map", points="x"), "points"),
    (asked("map", points=[[0, 0, 1], [1, 1, 1]]), "one class"),
    (asked("map", classes=5), "classes"), (asked("map", classes=1), "classes"),
    (asked("map", classes="2"), "classes"),
    (asked("map", x0=1, x1=1), "plane"), (asked("map", y0=2, y1=-2), "plane"),
    (asked("map", noise=1), "no 'noise'"), (asked("map", width=257), "width"),
    (asked("laplace", settings={"structure": "x"}), "structure"),
    (asked("sparse-gp", points=[]), "learns its prior"),
    (asked("map", seed=True), "seed"), (asked("map", evaluate=1), "evaluate"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_requests_have_plain_messages(request_: Any, words: str) -> None:
    with pytest.raises(DoxaError, match=words) as caught:
        panel(request_, Call())
    assert len(str(caught.value)) < 600


def test_facts_are_json_and_presets_are_fixed() -> None:
    found = classification.facts()
    text = json.dumps(found, allow_nan=False)
    assert len(text) < 200_000
    assert text == json.dumps(classification.facts())
    names = {one["name"] for one in found["methods"]}
    assert {"nngp", "map", "laplace", "deep-ensemble", "mc-dropout", "svgd", "hmc"} <= names
    assert {"moons", "rings", "gap", "overlap", "few", "far"} <= set(found["presets"])
    for preset in found["presets"].values():
        recipe = ClassRecipe.read(asked("map", **preset))
        assert {point[2] for point in recipe.points} == set(range(preset["classes"]))
        assert all(-4.8 <= x <= 4.8 and -3 <= y <= 3 for x, y, _ in recipe.points)
    for warm in classification.warm_up():
        warm()
    assert len(panel(asked("map", points=[]), Call())["draws"]) == DRAWS
