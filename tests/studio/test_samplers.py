"""The room of samplers: its numbers are the library's, and its requests are checked."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa.errors import DoxaError
from doxa.studio import samplers, workers
from doxa.studio.samplers import SAMPLERS, Recipe, controls_of, frames, python, target
from doxa.studio.targets import NETWORK, TARGETS, TYPED


class Call:
    """A call that is never cancelled."""

    number, cancelled = 1, False

    def show(self, content: Any) -> None:
        json.dumps(content)

    def check(self) -> None:
        pass


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are complete, however slow the machine is, and no process remembers a chain."""
    monkeypatch.setattr(samplers, "_ANSWER", math.inf)
    samplers._playing.clear()


def asked(sampler: str, **changes: Any) -> dict[str, Any]:
    recipe = {"target": "banana", "sampler": sampler, "chains": 3, "spread": 0.5, "seed": 3}
    return recipe | changes


def through_json(content: Any) -> Any:
    """As a page reads it."""
    return json.loads(json.dumps(workers.finite(content), allow_nan=False))


def steps_of(recipe: dict[str, Any], *counts: int) -> list[dict[str, Any]]:
    """The answers to requests of so many frames each, one after the other."""
    answers: list[dict[str, Any]] = []
    done = 0
    for count in counts:
        one = through_json(frames({"recipe": recipe, "done": done, "count": count}, Call()))
        done += len(one["frames"])
        answers.append(one)
    return answers


def together(answers: list[dict[str, Any]], part: str) -> list[Any]:
    return [one for answer in answers for one in answer[part]]


def numbers(each: Any) -> dict[str, Any]:
    """The tensors of a record, by name."""
    values = {name: getattr(each, name) for name in each.__dataclass_fields__}
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def check_numbers(recipe: dict[str, Any], count: int) -> dict[str, Any]:
    """Points, records and summary are those of the script that the panel shows, to the bit."""
    answers = steps_of(recipe, count // 2, count - count // 2)
    found = together(answers, "frames")
    code = python({"recipe": recipe, "done": count}, Call())["python"]
    script: dict[str, Any] = {}
    exec(compile(code, "shown", "exec"), script)
    assert len(found) == count
    assert [one["at"] for one in found] == script["points"].tolist()
    for one, step, records in zip(found, script["steps"], script["traces"], strict=True):
        assert (one["number"], one["stage"], one["kept"]) == (step.number, step.stage, step.kept)
        assert one["info"] == through_json({k: v.tolist() for k, v in step.info.items()})
        kinds = [type(each).__name__.lower() for each in records]
        assert [each.pop("kind") for each in one["trace"]] == kinds != []
        assert one["trace"] == through_json([numbers(each) for each in records])
    if "draws" in script:
        last = together(answers, "summaries")[-1]
        assert last["number"] == count
        for column in ("mean", "sd", "rhat", "ess_bulk", "ess_tail"):
            assert last[column] == through_json(script["table"][column].tolist())
        assert (last["status"], last["reason"]) == (script["status"], script["status"].reason)
    else:
        assert together(answers, "summaries") == []
    return script


@pytest.mark.parametrize("name", SAMPLERS)
def test_numbers_are_those_of_the_shown_python(name: str) -> None:
    first = next(iter(SAMPLERS[name].controls))
    value = 0.8 * SAMPLERS[name].controls[first]
    changes = [[7, first, value], [7, "restart", [0.3, -1.1]], [12, first, 0.5 * value]]
    if name == "constant-sgd":
        check_numbers(asked(name, changes=changes), 120)  # its first draw is after the optimum
    else:
        script = check_numbers(asked(name, changes=changes), 20)
        assert ("draws" in script) == (name not in ("sgd", "momentum"))


@pytest.mark.parametrize("name", ["sgd", "sgld", "minibatch-mh", "svgd", "hmc"])
def test_the_networks_gradients_are_of_its_rows(name: str) -> None:
    """Batches of eight rows; a change of their number; and no noise that is not theirs."""
    noisy = SAMPLERS[name].noisy
    changes = [[5, "batch_size", 32]] if noisy else []
    script = check_numbers(asked(name, target=NETWORK, changes=changes), 20)
    assert isinstance(script["density"], doxa.density.RowSum)
    gradients = [r for records in script["traces"] for r in records if hasattr(r, "noisy")]
    if gradients:
        spread = [float((r.noisy - r.full).norm()) for r in gradients]
        assert min(spread) > 0
        assert sum(spread[:5]) / 5 > sum(spread[5:]) / 15  # of more rows


@pytest.mark.parametrize("name", [*TARGETS, TYPED])
def test_every_target_runs(name: str) -> None:
    text = "logaddexp(-(x-1)**2, -(x+1)**2) - y**2/2 + 0*sin(x)" if name == TYPED else ""
    check_numbers(asked("mala", target=name, text=text, spread=0.1), 20)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("hmc", {"burn_in": 30, "leapfrog": 4, "mass": "full"}), ("momentum", {"momentum": 0.5}),
     ("nuts", {"burn_in": 25, "max_depth": 3}),
     ("metropolis", {"covariance": "diagonal", "burn_in": 30}),
     ("minibatch-mh", {"proposal": "walk"}), ("svgd", {"particles": 5})],
)  # fmt: skip
def test_settings_of_a_method_are_used(name: str, settings: dict[str, Any]) -> None:
    script = check_numbers(asked(name, settings=settings), 40)
    for key, value in settings.items():
        if key != "momentum":
            assert getattr(script["method"], key) == value
    plain = steps_of(asked(name), 40)
    assert together(plain, "frames")[-1]["at"] != script["points"][-1].tolist()


def test_pieces_are_the_whole() -> None:
    """Where the answers end has no influence, nor whether a process continues a chain."""
    recipe = asked("nuts", changes=[[9, "step_size", 0.4]])
    whole = steps_of(recipe, 24)
    pieces = steps_of(recipe, 1, 8, 1, 14)
    assert together(whole, "frames") == together(pieces, "frames")
    assert together(whole, "summaries") == together(pieces, "summaries")
    samplers._playing.clear()
    later = frames({"recipe": recipe, "done": 20, "count": 4}, Call())
    assert through_json(later["frames"]) == together(whole, "frames")[20:]
    assert whole[0]["starts"] == pieces[0]["starts"] != later["starts"]


def test_a_live_change_is_the_change_of_the_list() -> None:
    """A page that changes a control while the chain runs, and a link that has the list."""
    before = steps_of(asked("hmc"), 10)
    changes = [[10, "step_size", 0.3], [10, "restart", [1.0, 0.5]], [10, "mass", 2.0]]
    recipe = asked("hmc", changes=changes)
    chain = samplers._playing[samplers._key(Recipe.read(recipe))].chain
    live = through_json(frames({"recipe": recipe, "done": 10, "count": 10}, Call()))
    kept = samplers._playing[samplers._key(Recipe.read(recipe))].chain
    assert kept is chain, "the chain was continued, and not made again"
    samplers._playing.clear()
    linked = together(steps_of(recipe, 20), "frames")
    assert together(before, "frames") + live["frames"] == linked
    unchanged = together(steps_of(asked("hmc"), 20), "frames")
    assert linked[:10] == unchanged[:10]
    assert linked[10] != unchanged[10]
    back = asked("hmc", changes=[[4, "step_size", 0.05]])  # back to step 4, and on from there
    again = through_json(frames({"recipe": back, "done": 4, "count": 6}, Call()))
    samplers._playing.clear()
    assert again["frames"] == together(steps_of(back, 10), "frames")[4:]


def test_controls_at_the_start() -> None:
    for name in SAMPLERS:
        for at in ("banana", NETWORK):
            controls = controls_of(name, at)
            recipe = Recipe.read(asked(name, target=at))
            assert recipe.initial == controls
            chain = recipe.run()
            assert set(controls) - {"mass"} <= set(chain.controls), name
    one = together(steps_of(asked("hmc", initial={"step_size": 0.07}), 2), "frames")
    assert one[0]["info"]["step_size"] == [0.07] * 3
    one = together(steps_of(asked("sgld", initial={"step_size": 0.01}), 1), "frames")[0]
    record, other = one["trace"][0], torch.tensor(one["at"], dtype=torch.float64)
    start = torch.tensor(record["start"], dtype=torch.float64)
    torch.testing.assert_close(start + torch.tensor(record["moved"]).double(), other)


def test_the_parts_of_a_step_fit_together() -> None:
    """What the page draws: a trajectory ends in the proposal, a tree holds the next point, the
    moves of a gradient step and the forces of particles explain where they are."""
    tensor = lambda v: torch.tensor(v, dtype=torch.float64)  # noqa: E731
    start = None
    for one in together(steps_of(asked("hmc", initial={"step_size": 0.5}), 20), "frames"):
        path, proposal = one["trace"]
        assert path["positions"][0] == proposal["start"]
        assert path["positions"][-1] == proposal["end"]
        for k, accepted in enumerate(proposal["accepted"]):
            assert one["at"][k] == (proposal["end"] if accepted else proposal["start"])[k]
        assert start is None or proposal["start"] == start
        start = one["at"]
    for one in together(steps_of(asked("nuts"), 10), "frames"):
        (tree,) = one["trace"]
        assert [tree["positions"][i][k] for k, i in enumerate(tree["chosen"])] == one["at"]
    before = None
    for one in together(steps_of(asked("svgd", settings={"particles": 6}), 5), "frames"):
        (forces,) = one["trace"]
        assert before is None or forces["positions"] == before
        assert tensor(forces["drift"]).shape == (3, 6, 2)
        before = one["at"]


def test_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "LENGTH", 12)
    recipe = asked("sgd", chains=1)
    last = frames({"recipe": recipe, "done": samplers.LENGTH - 2, "count": 10}, Call())
    assert last["ended"] and len(last["frames"]) == 2
    assert frames({"recipe": recipe, "done": samplers.LENGTH, "count": 1}, Call())["ended"]


def test_an_answer_is_sent_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(samplers.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(samplers, "_ANSWER", 5)
    some = frames({"recipe": asked("metropolis"), "done": 0, "count": 50}, Call())
    assert 1 <= len(some["frames"]) < 10


def test_a_run_asks_whether_it_is_cancelled() -> None:
    class Cancelled(Call):
        def check(self) -> None:
            raise workers.Cancelled

    for done in (0, 200):
        with pytest.raises(workers.Cancelled):
            frames({"recipe": asked("hmc"), "done": done, "count": 5}, Cancelled())
        assert samplers._playing == {}


def test_a_process_keeps_few_chains() -> None:
    for seed in range(samplers._KEPT + 3):
        steps_of(asked("metropolis", seed=seed), 1)
    assert len(samplers._playing) == samplers._KEPT


def test_a_step_that_diverges_is_json() -> None:
    found = together(steps_of(asked("sgd", initial={"lr": 100.0}), 40), "frames")
    assert any(value is None for one in found for value in one["at"][0])


def test_targets_on_a_grid() -> None:
    """The levels hold their share of the probability, the marginals are densities, and the moments
    are those of the closed form."""
    view = list(TARGETS["standard"].view)
    found = through_json(target({"target": "standard", "view": view}, Call()))
    for mass, level in zip(found["masses"], found["levels"], strict=True):
        assert level == pytest.approx(math.log(1 - mass), abs=0.02)
    for one in found["marginals"]:
        step = one["at"][1] - one["at"][0]
        assert sum(one["density"]) * step == pytest.approx(1.0)
        normal = [math.exp(-0.5 * v * v) / math.sqrt(2 * math.pi) for v in one["at"]]
        assert one["density"] == pytest.approx(normal, abs=1e-4)
    assert found["mean"] == pytest.approx([0, 0], abs=1e-9)
    assert found["sd"] == pytest.approx([1, 1], abs=1e-3)
    assert found["log_density"][0][0] == -0.5 * (view[0] ** 2 + view[2] ** 2)
    other = target({"target": "correlated", "view": view}, Call())
    assert other["sd"] == pytest.approx([1, 1], abs=1e-2)
    for name, one in TARGETS.items():
        found = through_json(target({"target": name, "view": list(one.view)}, Call()))
        assert found["start"] == list(one.start)
        assert len(found["log_density"]) == len(found["y"]) == len(found["x"]) == 121


def test_a_target_that_is_nowhere_finite() -> None:
    wrong = {"target": TYPED, "text": "log(-1 - x**2) + y", "view": [-1, 1, -1, 1]}
    with pytest.raises(DoxaError, match="not finite"):
        target(wrong, Call())


WRONG: list[tuple[Any, str]] = [
    (None, "object"), ([], "object"), ({}, "no target"), ({"target": "banana"}, "no sampler"),
    (asked("gibbs"), "no sampler"), (asked("hmc", target="moon"), "no target"),
    (asked("hmc", target=["banana"]), "no target"), (asked("hmc", target=TYPED), "log density"),
    (asked("hmc", target=TYPED, text="__import__('os')"), "no function"),
    (asked("hmc", target=TYPED, text=3), "log density"), (asked("hmc", wide=1), "no 'wide'"),
    (asked("hmc", chains=0), "chains"), (asked("hmc", chains=9), "chains"),
    (asked("hmc", chains=1.5), "chains"), (asked("hmc", start=[0]), "start"),
    (asked("hmc", start=[0, None]), "start"), (asked("hmc", start=[0, 1e9]), "start"),
    (asked("hmc", start=[0, True]), "start"), (asked("hmc", spread=-1), "spread"),
    (asked("hmc", seed=-1), "seed"), (asked("sgld", noise=-1), "noise"),
    (asked("hmc", settings=[]), "settings"), (asked("hmc", settings={"draws": 10}), "no setting"),
    (asked("hmc", settings={"leapfrog": 1000}), "at most 100"),
    (asked("nuts", settings={"max_depth": 20}), "at most 8"),
    (asked("svgd", settings={"particles": 10**5}), "at most 60"),
    (asked("hmc", settings={"burn_in": 5000}), "at most 1000"),
    (asked("momentum", settings={"momentum": 1.0}), "momentum"),
    (asked("hmc", initial=[]), "initial"), (asked("hmc", initial={"lr": 0.1}), "no control"),
    (asked("hmc", initial={"step_size": 0}), "positive"),
    (asked("hmc", initial={"step_size": "1"}), "positive"),
    (asked("hmc", initial={"batch_size": 4}), "no control"),
    (asked("sgld", target=NETWORK, initial={"batch_size": 41}), "batch_size"),
    (asked("sgld", target=NETWORK, initial={"batch_size": 2.5}), "batch_size"),
    (asked("hmc", changes={}), "list"), (asked("hmc", changes=[[1, "mass", 1.0]] * 201), "at most"),
    (asked("hmc", changes=[[1, "mass"]]), "a step, a name"),
    (asked("hmc", changes=[[0, "mass", 1.0]]), "step of a change"),
    (asked("hmc", changes=[[True, "mass", 1.0]]), "step of a change"),
    (asked("hmc", changes=[[5, "mass", 1.0], [4, "mass", 1.0]]), "order"),
    (asked("hmc", changes=[[5, "mass", -1.0]]), "positive"),
    (asked("hmc", changes=[[5, "restart", 1.0]]), "restart"),
    (asked("hmc", changes=[[5, "draws", 10]]), "no control"),
    (asked("hmc", changes=[[5, ["mass"], 10]]), "no control"),
    (asked("hmc", target="donut", start=[1e5, 1e5], spread=0.0,
           initial={"temperature": 10**400}), "positive"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_requests_have_plain_messages(recipe: Any, words: str) -> None:
    with pytest.raises(DoxaError, match=words) as caught:
        frames({"recipe": recipe, "done": 0, "count": 1}, Call())
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "content",
    [None, {}, {"recipe": asked("hmc")}, {"recipe": asked("hmc"), "done": -1, "count": 1},
     {"recipe": asked("hmc"), "done": 0, "count": 201},
     {"recipe": asked("hmc"), "done": 10**9, "count": 1}],
)  # fmt: skip
def test_wrong_envelopes_have_plain_messages(content: Any) -> None:
    for task in (frames, python):
        with pytest.raises(DoxaError):
            task(content, Call())


@pytest.mark.parametrize("view", [None, [], [0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 1], [0, 1, 0, "1"]])
def test_wrong_views_have_plain_messages(view: Any) -> None:
    with pytest.raises(DoxaError, match="view"):
        target({"target": "banana", "view": view}, Call())


def test_facts_are_json() -> None:
    found = samplers.facts()
    text = json.dumps(found, allow_nan=False)
    assert text == json.dumps(samplers.facts())
    assert len(text) < 100_000
    for one in found["samplers"]:
        for field in one["settings"]:
            if field["name"] != "momentum":
                settings = {field["name"]: field["default"]}
                Recipe.read(asked(one["name"], settings=settings))
        Recipe.read(asked(one["name"], settings=one["start"], initial=one["controls"]))
    for warm in samplers.warm_up():
        warm()


def test_every_sampler_and_target_has_its_texts() -> None:
    """A name, an equation and two sentences for each sampler; a name for each target and control.
    Every text that a page uses is in the catalogue."""
    pages = Path(samplers.__file__).parent / "pages"
    catalogue = (pages / "strings.js").read_text(encoding="utf-8")

    def block(name: str) -> dict[str, str]:
        body = re.search(rf"^  {name}: \{{(.*?)^  \}},", catalogue, re.DOTALL | re.MULTILINE)
        assert body is not None, name
        return dict(re.findall(r'"?([\w-]+)"?: "((?:[^"\\]|\\.)*)"', body[1]))

    for name in ("samplerNames", "equations", "sentences"):
        assert set(block(name)) == set(SAMPLERS), name
    for name, said in block("sentences").items():
        assert len(re.findall(r"\.(?: |$)", said)) == 2, name
    assert set(block("targets")) == {*TARGETS, TYPED}
    controls = {each for one in SAMPLERS.values() for each in one.controls} | {"batch_size"}
    assert set(block("controls")) == controls
    used: set[str] = set()
    for page in pages.glob("*.html"):
        used |= set(re.findall(r'data-text="(\w+)"', page.read_text(encoding="utf-8")))
    known = set(re.findall(r"^  (\w+):", catalogue, re.MULTILINE))
    known |= set(re.findall(r"[,{] (\w+): ", catalogue))
    assert used - known == set()


def test_a_panel_continues_in_the_process_that_has_its_chain() -> None:
    """Another process would make all steps again. It takes the panel only if it has nothing to
    continue itself, or if the first one is busy in a room whose jobs may take long."""

    class Pipe:
        def send_bytes(self, text: bytes) -> None:
            assert json.loads(text)["room"] in workers.ROOMS

    async def main() -> None:
        pool = workers.Pool()
        first, second = (workers._Worker(None, Pipe(), ready=True) for _ in range(2))
        pool._workers = [first, second]

        def ask(name: str, room: str = "samplers") -> None:
            pool.submit(workers.Job((1, name), room, "frames", {}, lambda kind, content: None))

        def done(worker: workers._Worker) -> None:
            pool._free(worker)
            pool._assign()

        def computed() -> list[str | None]:
            jobs = (worker.job for worker in pool._workers)
            return [job.panel[1] if job else None for job in jobs]  # type: ignore[index]

        for name in "ab":
            ask(name)
        assert computed() == ["a", "b"]
        done(first), done(second)
        ask("b")
        assert computed() == [None, "b"]
        ask("b2")
        assert computed() == ["b2", "b"]
        done(first), done(second)
        ask("a")
        ask("b2")
        assert computed() == ["a", None], "b2 waits for the first process"
        done(first)
        assert computed() == ["b2", None]
        done(first)
        ask("f", "functions")
        ask("a")
        assert computed() == ["f", "a"], "a fit may take long: the chain is made again"
        done(first), done(second)
        ask("a")
        assert computed() == [None, "a"]
        done(second)
        pool.leave(1)
        assert first.panels == second.panels == set()

    asyncio.run(main())
