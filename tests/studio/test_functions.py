"""The room of functions: its numbers are the library's, and its requests are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa.errors import DoxaError
from doxa.studio import functions, recipes, workers
from doxa.studio.forms import describe, is_exact, methods_for, read_settings
from doxa.studio.functions import DRAWS, GRID, Recipe, orders, panel, path

POINTS = [[-2.0, -0.7], [-1.3, -1.1], [-0.4, -0.6], [0.1, 0.2], [0.9, 0.8], [1.4, 1.2], [2.2, 0.6]]
METHODS = [row.name for row in methods_for("regression")]
EXACT = [name for name in METHODS if is_exact(name)]


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


def through_json(content: Any) -> Any:
    """As a page reads it."""
    return json.loads(json.dumps(workers.finite(content), allow_nan=False))


def run_script(code: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(code, "shown", "exec"), found)
    return found


def rows(f: torch.Tensor) -> list[list[float]]:
    return f.reshape(len(f), -1).tolist()


def check_numbers(request: dict[str, Any]) -> list[Any]:
    """The numbers of a panel are those of the script that it shows, to the bit."""
    call = Call()
    found = through_json(panel(request, call))
    script = run_script(found["python"])
    assert found["grid"] == script["grid"][:, 0].tolist()
    if found["prior"]:
        assert found["prior"] == rows(script["prior"])
    if request["points"]:
        for name in ("mean", "aleatoric", "epistemic"):
            assert found[name] == script[name].reshape(-1).tolist()
        assert found["draws"] == rows(script["draws"])
        assert found["status"] == script["posterior"].status
        assert found["reason"] == script["posterior"].status.reason
    return call.shown


@pytest.mark.parametrize("name", EXACT)
def test_numbers_of_exact_methods_are_the_librarys(name: str) -> None:
    assert check_numbers(asked(name, settings=recipes.START.get(name, {}), noise=0.3)) == []


@pytest.mark.parametrize("name", EXACT)
def test_numbers_before_data_are_the_priors(name: str) -> None:
    check_numbers(asked(name, points=[]))


@pytest.mark.parametrize("name", ["map", "mc-dropout", "swag", "laplace"])
def test_numbers_of_trained_methods_are_the_librarys(name: str) -> None:
    settings = {"rank": 2} if name == "swag" else {}
    shown = check_numbers(asked(name, settings=settings, steps=100, seed=3, prior=2.0))
    assert shown and all(one["preview"] for one in shown)
    assert 10 <= shown[0]["steps"] < 100


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in EXACT])
@pytest.mark.matrix
def test_numbers_of_every_method_are_the_librarys(name: str) -> None:
    settings = {"rank": 2} if name == "swag" else dict(doxa.methods()[name].short)
    if "inducing" in settings:
        settings["inducing"] = 5  # of the few points
    steps = None if "draws" in settings else 100
    check_numbers(asked(name, settings=settings, steps=steps, activation="relu", depth=2))


def test_the_network_may_give_the_noise() -> None:
    check_numbers(asked("map", noise="heteroscedastic", steps=30, prior_kind="fan-in"))


def test_the_prior_before_data_does_not_depend_on_the_row() -> None:
    """The fit before data needs a row: another one gives the same functions."""
    for name in [*EXACT, "mc-dropout"]:
        recipe = Recipe.read(asked(name, points=[], seed=4))
        found = [
            rows(one.fit().prior_functions(recipe.grid, n=DRAWS))
            for y in (0.0, 2.5)
            for one in [functions.replace(recipe.before_data, points=((1.0, y),))]
        ]
        assert (
            found[0]
            == found[1]
            == through_json(panel(asked(name, points=[], seed=4), Call()))["prior"]
        )


def test_paths_pass_through_draws_and_are_draws_everywhere() -> None:
    """A quarter of a turn leads from one draw to another. At every angle the variance over many
    pairs is the posterior's: cos² + sin² = 1."""
    for points in (POINTS, []):
        request = asked("gp", points=points, noise=0.2)
        frames = torch.tensor(path(request, Call())["frames"], dtype=torch.float64)
        found = panel(request, Call())
        exact = {"dtype": torch.float64}
        drawn = torch.tensor(found["draws"] if points else found["prior"], **exact)
        turn = frames.shape[1]
        torch.testing.assert_close(frames[:, 0], drawn[0:6:2], rtol=0, atol=1e-12)
        torch.testing.assert_close(frames[:, turn // 4], drawn[1:6:2], rtol=0, atol=1e-12)
        mean = torch.tensor(found["mean"] if points else [0.0] * GRID, **exact)
        opposite = frames[:, : turn // 2] + frames[:, turn // 2 :]
        torch.testing.assert_close(opposite, (2 * mean).expand_as(opposite), rtol=0, atol=1e-12)


def test_paths_are_for_gaussian_functions_only() -> None:
    for name in ("map", "hmc"):
        with pytest.raises(DoxaError, match="not Gaussian"):
            path(asked(name, steps=20), Call())
    with pytest.raises(DoxaError, match="several members"):
        path(asked("gp", members=2), Call())


def test_the_orders_are_those_of_the_library() -> None:
    x = torch.linspace(-2, 2, 25, dtype=torch.float64)
    noise = torch.randn(25, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = 0.7 * x**2 - 1 + 0.1 * noise
    points = torch.stack([x, y], 1).tolist()
    found = through_json(orders(asked("linear", points=points), Call()))
    sweep = doxa.fit(
        None, (x[:, None], y), doxa.BayesianLinear("polynomial", degree=8),
        runs=doxa.Runs(grid={"degree": found["degrees"]}), likelihood="gaussian",
    )  # fmt: skip
    assert found["log_evidence"] == [float(one.log_evidence) for one in sweep]
    assert found["probability"].index(max(found["probability"])) == 2
    assert sum(found["probability"]) == pytest.approx(1.0)
    with pytest.raises(DoxaError, match="two points"):
        orders(asked("linear", points=POINTS[:1]), Call())


@pytest.mark.slow
def test_the_distance_is_the_librarys() -> None:
    of, reference = asked("linear", noise=0.2), asked("gp", noise=0.2)
    found = functions.distance({"of": of, "reference": reference}, Call())
    grid = Recipe.read(of).grid
    p, q = (Recipe.read(one).fit().predict(grid) for one in (of, reference))
    assert found["total_variation"] == doxa.evaluate.total_variation(p, q) > 0
    assert found["wasserstein2"] == doxa.evaluate.wasserstein2(p, q) > 0
    same = functions.distance({"of": of, "reference": of}, Call())
    assert same == {"total_variation": 0.0, "wasserstein2": 0.0}
    for wrong in (None, {}, {"of": of}, {"of": of, "reference": asked("gp", points=[])}):
        with pytest.raises(DoxaError, match=r"points|two requests"):
            functions.distance(wrong, Call())


def on_its_way(name: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[dict[str, Any]]:
    """All pictures of a panel, the last one too, without pauses between them."""
    monkeypatch.setattr(recipes, "_PAUSE", 0.0)
    monkeypatch.setattr(recipes.time, "monotonic", lambda: 0.0)  # no picture takes time
    recipes._posteriors.clear()
    call = Call()
    last = panel(asked(name, **more), call)
    return [*call.shown, last]


@pytest.mark.parametrize("name", ["map", "swag", "laplace", "mean-field"])
def test_pictures_on_the_way_are_states_of_the_fit(name, monkeypatch) -> None:
    """They are those that a callback of the same fit sees, and the last one is the fit's result."""
    settings = {"rank": 2, "cycle": 2} if name == "swag" else {}
    *some, last = on_its_way(name, monkeypatch, steps=60, settings=settings)
    assert [one["steps"] for one in some][:5] == [10, 20, 30, 40, 50]
    assert all(one["preview"] and one["status"] == "unfinished" for one in some)
    recipe, seen = Recipe.read(asked(name, steps=60, settings=settings)), {}

    def keep(snapshot: doxa.Snapshot) -> None:
        if not snapshot.last:
            mean = snapshot.posterior.predict(recipe.grid).mean
            seen[snapshot.step] = mean.reshape(-1).tolist()

    recipe.fit(show=keep)
    assert [one["mean"] for one in some] == [seen[one["steps"]] for one in some]
    plain = recipe.fit()
    assert last["mean"] == plain.predict(recipe.grid).mean.reshape(-1).tolist()
    assert last["preview"] is False and some[0]["mean"] != last["mean"]


def test_a_long_chain_streams_in(monkeypatch) -> None:
    chain = {"draws": 40, "burn_in": 20, "leapfrog": 3}
    *some, last = on_its_way("hmc", monkeypatch, settings=chain, members=2)
    assert len(some) >= 5 and len(some[-2]["draws"]) > 1
    assert last["status"] != "unfinished"


def test_exact_methods_and_priors_have_one_picture(monkeypatch) -> None:
    assert len(on_its_way("gp", monkeypatch)) == 1
    assert len(on_its_way("map", monkeypatch, points=[])) == 1


def test_pictures_take_little_of_the_time(monkeypatch) -> None:
    """After a picture that took a second there is none for four seconds."""
    now = [0.0]
    monkeypatch.setattr(recipes.time, "monotonic", lambda: now[0])

    def slow(recipe: Recipe, posterior: Any) -> dict[str, Any]:
        now[0] += 1.0
        return {}

    call = Call()
    previews = recipes.Previews(Recipe.read(asked("map")), call, slow)
    for step in range(100):
        previews(doxa.Snapshot(step, "train", 1, lambda: [None]))  # type: ignore[list-item]
        now[0] += 0.1
    assert len(call.shown) == 3


def test_a_fit_asks_whether_it_is_cancelled() -> None:
    asking = []

    def stop() -> bool:
        asking.append(True)
        return True

    posterior = Recipe.read(asked("map", steps=5000)).fit(stop)
    assert asking
    assert posterior.status == "stopped"
    assert (posterior.diagnostics.steps or 0) < 5000


WRONG: list[tuple[Any, str]] = [
    (None, "object"), ([], "object"), ({}, "no method"), ({"method": "gp"}, "points"),
    (asked("cnp"), "no method"), (asked("gp", points=[[1]]), "point 0"),
    (asked("gp", points=[[0, 1], [0, None]]), "point 1"),
    (asked("gp", points=[[0, True]]), "point 0"),
    (asked("gp", points=[[0, 1e7]]), "point 0"), (asked("gp", points=[["0", 1]]), "point 0"),
    (asked("gp", points=[[0, 0]] * 301), "at most 300"), (asked("gp", points="x"), "points"),
    (asked("gp", points=[[0, 10**400]]), "point 0"),
    (asked("gp", low=1, high=1), "left end"), (asked("gp", low="a"), "low"),
    (asked("map", width=257), "width"), (asked("map", depth=0), "depth"),
    (asked("map", width=2.5), "width"), (asked("map", activation="import os"), "activation"),
    (asked("map", prior=0), "prior"),
    (asked("map", prior_kind=["normal"]), "prior_kind"), (asked("map", steps=10**6), "steps"),
    (asked("map", members=0), "members"), (asked("map", noise=-1), "noise"),
    (asked("map", noise="loud"), "noise"), (asked("map", seed=-1), "seed"),
    (asked("map", evaluate=1), "evaluate"), (asked("map", lr=1), "no 'lr'"),
    (asked("gp", settings=[]), "settings"), (asked("gp", settings={"rank": 1}), "no setting"),
    (asked("gp", settings={"noise": 1}), "no setting"),
    (asked("nngp", settings={"net": 1}), "no setting"),
    (asked("gp", settings={"kernel": "x" * 61}), "60 characters"),
    (asked("gp", settings={"refine": 10**9}), "at most"),
    (asked("gp", settings={"refine": {"a": 1}}), "refine"),
    (asked("gp", settings={"learn_kernel": "yes"}), "learn_kernel"),
    (asked("gp", settings={"kernel": "__import__('os')"}), "kernel"),
    (asked("hmc", settings={"draws": 0}), "draws"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_requests_have_plain_messages(request_: Any, words: str) -> None:
    with pytest.raises(DoxaError, match=words) as caught:
        panel(request_, Call())
    assert len(str(caught.value)) < 600


def test_forms_are_the_declared_fields() -> None:
    """Each default of a form is that of the method, and the form's values make the method."""
    for row in methods_for("regression"):
        about = describe(row, ("noise", "net"))
        cls = doxa.get_method(row.name)
        plain = cls()
        assert about["settings"] or row.name in ("map", "bootstrap"), row.name
        for field in about["settings"]:
            assert getattr(plain, field["name"]) == field["default"]
            assert field["help"], (row.name, field["name"])
            assert read_settings(row.name, {field["name"]: field["default"]}) == {}
            if field["kind"] == "whole":
                value = max(field["least"], 1) + 1
                settings = read_settings(row.name, {field["name"]: float(value)})
                assert settings in ({field["name"]: value}, {})


def test_facts_are_json_and_presets_are_fixed() -> None:
    found = functions.facts()
    text = json.dumps(found, allow_nan=False)
    assert len(text) < 200_000
    assert text == json.dumps(functions.facts())
    names = {one["name"] for one in found["methods"]}
    assert {"gp", "linear", "nngp", "map", "deep-ensemble", "mc-dropout", "laplace", "swag",
            "mean-field", "hmc", "nuts"} <= names  # fmt: skip
    for points in found["presets"].values():
        Recipe.read(asked("gp", points=points))
    for name, settings in recipes.START.items():
        read_settings(name, settings, ("noise",))


def test_every_text_of_the_pages_is_in_the_catalogue() -> None:
    """The pages have no text of their own but the title, and every name that they use is there."""
    import re

    pages = Path(functions.__file__).parent / "pages"
    catalogue = (pages / "strings.js").read_text(encoding="utf-8")
    known = set(re.findall(r"^  (\w+):", catalogue, re.MULTILINE))
    known |= set(re.findall(r"[,{] (\w+): ", catalogue))
    used: set[str] = set()
    for page in pages.glob("*.html"):
        html = page.read_text(encoding="utf-8")
        used |= set(re.findall(r'data-(?:text|label)="(\w+)"', html))
    for script in pages.glob("*.js"):
        used |= set(re.findall(r"(?<![\w.])text\.(\w+)", script.read_text(encoding="utf-8")))
    assert used - known == set()
    for page in pages.glob("*.html"):
        assert " style=" not in page.read_text(encoding="utf-8"), "the policy allows none"
        assert "<script>" not in page.read_text(encoding="utf-8")
