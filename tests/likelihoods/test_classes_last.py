"""Logits with the classes last, [N, T, C], as language models return them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from language import LENGTH, WORDS, Output, Tagger, Writer, sentences
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import doxa
from doxa.errors import DataError, ModelError
from doxa.text import next_token, per_token

X, Y = next_token(sentences())
LIKELIHOOD = doxa.Categorical(ignore_index=-100)


class First(nn.Module):
    """The same network with the classes first, [N, C, T]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **x: Tensor) -> Tensor:
        return self.net(**x).logits.mT


def test_the_log_likelihood_of_a_row_is_the_sum_over_its_tokens() -> None:
    net = Writer()
    model = doxa.Model(net, doxa.Categorical(ignore_index=-100, classes_last=True)).build(X)
    assert model.output == (WORDS, LENGTH)
    each = cross_entropy(net(**X).logits.mT, Y, ignore_index=-100, reduction="none")
    torch.testing.assert_close(model.log_likelihood({}, X, Y), -each.sum(1))


@pytest.mark.parametrize("engine", ["stack", "loop"])
@pytest.mark.parametrize("method", ["map", "mean-field", "sgld", "diagonal"])
def test_a_fit_is_that_of_the_classes_first(method: str, engine: str) -> None:
    chosen: dict[str, Any] = {
        "sgld": doxa.SGLD(3, 2, 1), "diagonal": doxa.Laplace("diagonal"),
    }  # fmt: skip
    net = Writer().double()
    options: dict[str, Any] = {
        "steps": 3, "members": 2, "engine": engine, "validation": None, "init": "given",
        "likelihood": LIKELIHOOD, "progress": False,
    }  # fmt: skip
    if method == "sgld":
        del options["steps"]
    last = doxa.fit(net, (X, Y), chosen.get(method, method), **options)
    first = doxa.fit(First(net), (X, Y), chosen.get(method, method), **options)
    assert last.likelihood.classes_last and first.likelihood.classes_last is None
    n = None if method in ("map", "sgld") else 4
    ours, theirs = (p.predict(X, n=n) for p in (last, first))
    assert ours.probs.shape == (16, WORDS, LENGTH)
    torch.testing.assert_close(ours.probs, theirs.probs, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(ours.mutual_information, theirs.mutual_information)
    torch.testing.assert_close(ours.log_prob(Y), theirs.log_prob(Y))


@pytest.mark.parametrize("given", [None, "categorical", LIKELIHOOD])
def test_the_axis_follows_from_y(given: Any, tmp_path: Any) -> None:
    y = Y if given is LIKELIHOOD else Y.clamp(min=0)
    posterior = doxa.fit(
        Writer(), (X, y), "map", likelihood=given, steps=2, validation=None, progress=False
    )
    assert posterior.likelihood.classes_last is True
    assert posterior.model.output == (WORDS, LENGTH)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=Writer())
    assert torch.equal(again.predict(X).probs, posterior.predict(X).probs)


def test_n_is_the_number_of_sequences() -> None:
    fitted = doxa.fit(
        Writer(), (X, Y), "map", likelihood=LIKELIHOOD, steps=1, validation=None, progress=False
    )
    assert fitted.diagnostics["rows"] == 16


def test_what_is_at_padding_changes_nothing() -> None:
    """Neither the input there nor its label counts."""
    net = Writer()
    mask = X["attention_mask"] > 0
    other = {**X, "input_ids": torch.where(mask, X["input_ids"], 3)}
    fits = [
        doxa.fit(net, (x, Y), "map", likelihood=LIKELIHOOD, steps=5, validation=None, init="given",
                 progress=False)
        for x in (X, other)
    ]  # fmt: skip
    one, two = (p.predict(X).probs for p in fits)
    torch.testing.assert_close(one, two)


def test_shapes_that_fit_both_axes_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    x = {"input_ids": torch.randint(0, WORDS, (5, WORDS))}
    y = x["input_ids"] % 3
    with caplog.at_level(logging.WARNING, "doxa"):
        doxa.fit(Writer(), (x, y), "map", likelihood="categorical", steps=1, progress=False)
    assert "classes_last=True" in caplog.text
    caplog.clear()
    fitted = doxa.fit(
        Writer(), (x, y), "map", likelihood=doxa.Categorical(classes_last=True), steps=1,
        progress=False,
    )  # fmt: skip
    assert fitted.likelihood.classes_last is True
    assert "classes_last" not in caplog.text


class Both(nn.Module):
    """Two heads: a class of each token, and a number of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger, self.value = Tagger(), Tagger(1, tokens=False)

    def forward(self, **x: Tensor) -> tuple[Tensor, Tensor]:
        return self.tagger(**x).logits, self.value(**x).logits


def test_a_head_of_tokens_beside_another() -> None:
    tags = torch.where(X["attention_mask"] > 0, X["input_ids"] % 3, -100)
    y = (tags, torch.randn(16, 1))
    posterior = doxa.fit(
        Both(), (X, y), "map", likelihood=(LIKELIHOOD, "gaussian"), steps=2, validation=None,
        progress=False,
    )  # fmt: skip
    tokens, value = posterior.predict(X).heads
    assert tokens.probs.shape == (16, 3, LENGTH)
    assert value.mean.shape == (16, 1)


def test_labels_to_ignore_are_named_in_the_error() -> None:
    with pytest.raises(DataError, match=r"Categorical\(ignore_index=-100\)"):
        doxa.fit(Writer(), (X, Y), "map", likelihood="categorical", progress=False)
    with pytest.raises(ModelError, match="classes_last"):
        doxa.Categorical(classes_last=2)  # type: ignore[arg-type]


def test_scores_per_token() -> None:
    """From the probabilities of two members by hand; NaN exactly where labels are ignored."""
    f = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    y = torch.randint(0, 4, (3, 5))
    y[0, 2:] = -100
    p = doxa.Predictive(f, LIKELIHOOD)
    found = per_token(p, y)
    each = f.softmax(2)
    mean = each.mean(0)
    own = -(each * each.log()).sum(2).mean(0)
    total = -(mean * mean.log()).sum(1)
    counted = y != -100
    chosen = mean.gather(1, y.clamp(min=0).unsqueeze(1)).squeeze(1).log()
    for values, expected in (
        (found.log_prob, chosen), (found.entropy, total), (found.expected_entropy, own),
        (found.mutual_information, total - own),
    ):  # fmt: skip
        torch.testing.assert_close(values[counted], expected[counted])
        assert torch.equal(values.isnan(), ~counted)
    assert found.tokens == 12
    assert found.nll == pytest.approx(-float(chosen[counted].mean()))
    with pytest.raises(doxa.errors.ShapeError, match=r"\[N, T\]"):
        per_token(p, y[:, :4])
    with pytest.raises(doxa.errors.ShapeError, match="row 0, position 2 is -1"):
        per_token(p, y.masked_fill(y == -100, -1))


def test_other_kinds_of_output_are_left_alone() -> None:
    likelihood = doxa.Categorical(classes_last=True)
    row = torch.randn(4, 3)
    assert likelihood.arrange(row) is row  # [N, C]
    assert likelihood.arrange(Output()).logits is None  # what is no tensor is reported elsewhere
