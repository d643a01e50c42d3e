"""Batches of tokens: labels inside, padding, next tokens, and the data that `fit` accepts."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from language import Tagger, Writer, sentences
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import doxa
from doxa.errors import DataError, ShapeError
from doxa.text import next_token, pad

X = sentences()
CLASSES = torch.arange(16) % 3
OPTIONS: dict[str, Any] = {"steps": 3, "validation": None, "progress": False, "batch_size": 16}


class Encoding(UserDict[str, Tensor]):
    """As a tokeniser returns it: a mapping that is no dict."""


class Listed(Dataset[Any]):
    """Rows of lists of uneven length, without padding."""

    def __init__(self, x: dict[str, Tensor], labels: Tensor) -> None:
        self.lengths = x["attention_mask"].sum(1).tolist()
        self.ids, self.labels = x["input_ids"].tolist(), labels.tolist()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.ids[i][: self.lengths[i]], "label": self.labels[i], "text": "a"}


class Columns:
    """Like a Dataset of the package datasets: columns with names, rows by number, not of torch."""

    def __init__(self, rows: Listed) -> None:
        self.rows = rows
        self.column_names = ["input_ids", "label", "text"]

    def set_format(self, kind: str) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]


class Ragged(Listed):
    """Tensors of uneven length."""

    def __init__(self, rows: Listed) -> None:
        self.__dict__ |= rows.__dict__

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = super().__getitem__(i)
        return {"input_ids": torch.tensor(row["input_ids"]), "label": row["label"]}


LISTED = Listed(X, CLASSES)
DATA: dict[str, Any] = {
    "labels in a dict": {**X, "labels": CLASSES},
    "label in a mapping": Encoding({**X, "label": CLASSES}),
    "a pair with a mapping": (Encoding(X), CLASSES),
    "a dataset of lists": LISTED,
    "a table of columns": Columns(LISTED),
    "a loader that pads": DataLoader(LISTED, batch_size=16, collate_fn=pad),
}


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_batch_gives_the_same_fit(kind: str) -> None:
    net = Tagger(tokens=False)
    plain = doxa.fit(net, (X, CLASSES), "map", likelihood="categorical", **OPTIONS)
    found = doxa.fit(net, DATA[kind], "map", likelihood="categorical", **OPTIONS)
    assert torch.equal(found.predict(X).probs, plain.predict(X).probs)
    given = DATA[kind] if kind != "a pair with a mapping" else X
    torch.testing.assert_close(found.predict(given).probs, plain.predict(X).probs)


def test_batches_padded_on_their_own_are_joined() -> None:
    """A loader pads each batch to its longest row: predictions are those of the whole."""
    posterior = doxa.fit(
        Writer(), next_token(X), "map", likelihood=doxa.Categorical(ignore_index=-100), **OPTIONS
    )
    some = Listed({k: v[1:] for k, v in X.items()}, CLASSES[1:])
    loader = DataLoader(some, batch_size=2, collate_fn=pad)
    assert len({part["input_ids"].shape[1] for part in loader}) > 1
    whole = pad([some[i] for i in range(15)])
    torch.testing.assert_close(posterior.predict(loader).probs, posterior.predict(whole).probs)


def test_sequences_of_another_length_are_predicted() -> None:
    posterior = doxa.fit(
        Writer(), next_token(X), "map", likelihood=doxa.Categorical(ignore_index=-100), **OPTIONS
    )
    short = {k: v[:, :3] for k, v in X.items()}
    probs = posterior.predict(short).probs
    torch.testing.assert_close(probs, posterior.predict(X).probs[:, :, :3])
    with pytest.raises(ShapeError, match="inputs 'input_ids', but the fit had 'attention_mask', "):
        posterior.predict({"input_ids": X["input_ids"]})


def test_next_token_of_rows_padded_on_either_side() -> None:
    ids = torch.tensor([[5, 6, 4, 0], [0, 0, 3, 2]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    x, y = next_token({"input_ids": ids, "attention_mask": mask})
    assert list(x) == ["input_ids", "attention_mask"]
    assert y.tolist() == [[6, 4, -100, -100], [-100, -100, 2, -100]]
    assert next_token(ids, ignore_index=-1)[1].tolist() == [[6, 4, 0, -1], [0, 3, 2, -1]]


def test_next_token_leaves_the_prompt_out() -> None:
    """transformers' own labels, of a prompt of two tokens: only the answer counts."""
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0]]),
        "labels": torch.tensor([[-100, -100, 3, 4, -100]]),
    }
    x, y = next_token(batch)
    assert "labels" not in x
    assert y.tolist() == [[-100, 3, 4, -100, -100]]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"ids": torch.ones(2, 3).long()}, DataError, "no 'input_ids'; it has 'ids'"),
        (torch.ones(2, 3), ShapeError, "whole numbers"),
        ({"input_ids": torch.ones(2, 3).long(), "labels": torch.ones(2)}, ShapeError, "labels"),
    ],
)
def test_next_token_of_what_is_no_batch_of_tokens(data: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        next_token(data)


def test_padding() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "labels": [1, 1, 2], "text": "abc", "weight": 0.5},
        {"input_ids": torch.tensor([8]), "labels": [2], "text": "d", "weight": 1.5},
    ]
    batch = pad(rows, token=9)
    assert sorted(batch) == ["attention_mask", "input_ids", "labels", "weight"]
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 1, 2], [2, -100, -100]]
    assert pad(rows, side="left")["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert pad([rows[0], rows[0]])["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    with pytest.raises(DataError, match="'labels' of some rows has the shapes"):
        pad([{"labels": 1}, {"labels": [1, 2]}])
    with pytest.raises(DataError, match="side"):
        pad(rows, side="middle")


def test_labels_that_were_not_moved_are_an_error() -> None:
    labels = torch.where(X["attention_mask"] > 0, X["input_ids"], -100)
    with pytest.raises(DataError, match=r"doxa\.text\.next_token"):
        doxa.fit(Writer(), {**X, "labels": labels}, "map", **OPTIONS)


def test_a_batch_without_labels_names_what_it_has() -> None:
    loader = DataLoader(Listed(X, CLASSES), batch_size=8, collate_fn=lambda rows: {"ids": [1]})
    with pytest.raises(DataError, match="'labels', 'label' or 'label_ids'; it has 'ids'"):
        doxa.fit(Tagger(), loader, "map", **OPTIONS)
    with pytest.raises(DataError, match=r"one batch.*collate_fn=doxa\.text\.pad"):
        doxa.fit(Tagger(), Ragged(LISTED), "map", **OPTIONS)
    with pytest.raises(DataError, match="a dict with labels"):
        doxa.fit(Tagger(), X, "map", **OPTIONS)
