"""Sequences of tokens: dicts of inputs with their labels inside, padding, and next tokens.

The networks of the library transformers take named inputs. Their batches are dicts:

    input_ids       [N, T]     the tokens
    attention_mask  [N, T]     1 at tokens, 0 at padding
    labels          [N]        a class per sequence, or
    labels          [N, T]     a class per token; −100 is ignored

`split_labels` divides such a dict into x, which is a dict without labels, and y. `pad` makes a
batch from rows of different lengths. A `Dataset` or a `DataLoader` may return such dicts.

**Next tokens.** The logits of a causal language model at position t predict the token at t + 1. A
fit does not shift labels: it compares y[:, t] with the logits at t. `next_token` therefore makes
shifted labels,

    y[:, t] = ids[:, t + 1]    where both are tokens, −100 elsewhere and at the last position

Labels for the loss of transformers are not shifted, because that loss shifts them inside the
network. In a fit, they would train the network to repeat its input, so `split_labels` raises an
error for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from doxa.errors import DataError, ShapeError

IGNORED = -100  # the label of ignored positions in torch and transformers
LABELS = ("labels", "label", "label_ids")
IDS, MASK = "input_ids", "attention_mask"


def labels_of(batch: Mapping[str, Any]) -> str | None:
    """The name of the labels in a batch, or None."""
    return next((name for name in LABELS if batch.get(name) is not None), None)


def split_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Divide a batch with labels inside into x, the batch without its labels, and y.

    Raises
    ------
    DataError
        If the batch has no labels or no inputs, or if its labels are not shifted.
    """
    name = labels_of(batch)
    if name is None:
        raise DataError(
            f"a batch has no entry {', '.join(map(repr, LABELS[:-1]))} or {LABELS[-1]!r}; it has "
            f"{', '.join(map(repr, batch))}: name the labels so, or pass a pair (x, y)"
        )
    x, y = {key: part for key, part in batch.items() if key not in LABELS}, batch[name]
    if not x:
        raise DataError(f"a batch has {name!r} only: it needs inputs, too")
    ids = x.get(IDS)
    if isinstance(y, Tensor) and isinstance(ids, Tensor) and _repeat(ids, y):
        raise DataError(
            f"{name!r} repeat 'input_ids' at the same positions, and a fit compares the outputs at "
            "a position with the labels there: for the next token, pass "
            "doxa.text.next_token(batch), in a DataLoader within its collate_fn"
        )
    return x, y


def _repeat(ids: Tensor, y: Tensor) -> bool:
    """Whether the labels equal the tokens at the same positions, so that they are not shifted."""
    if y.shape != ids.shape or y.ndim < 2 or y.is_floating_point():
        return False
    counted = y != IGNORED
    return bool(counted.any()) and bool((y == ids)[counted].all())


def without_labels(x: Mapping[str, Any], inputs: Any = None) -> dict[str, Any]:
    """The entries of a batch without its labels. A label that was an input of the network in the
    fit, by name in `inputs`, is kept."""
    own = inputs if isinstance(inputs, Mapping) else {}
    return {key: part for key, part in x.items() if key not in LABELS or key in own}


def next_token(data: Any, ignore_index: int = IGNORED) -> tuple[Any, Tensor]:
    """Make x and y for a causal language model. The label at each position is the next token.

    The label is `ignore_index` at the last position, at padding, and where the next token is
    ignored. Padding may be on either side.

    Parameters
    ----------
    data : Tensor or dict
        Tokens [N, T], or a batch with "input_ids" and, where there is padding, "attention_mask".
        It may have "labels" [N, T] that are not shifted, as transformers uses them. The labels are
        then shifted in place of the tokens. Tokens with the label −100, such as those of a prompt,
        are ignored as targets.
    ignore_index : int, default -100
        The label of ignored positions, as in `doxa.Categorical(ignore_index=-100)`.

    Returns
    -------
    tuple
        (x, y): the data without labels, and the shifted labels [N, T].

    Examples
    --------
    >>> import torch, doxa
    >>> doxa.text.next_token(torch.tensor([[5, 6, 7]]))[1]
    tensor([[   6,    7, -100]])
    """
    if not isinstance(data, Mapping):
        ids, x, labels, mask = data, data, None, None
    else:
        name, x = labels_of(data), without_labels(data)
        if IDS not in data:
            raise DataError(f"a batch has no 'input_ids'; it has {', '.join(map(repr, data))}")
        ids, labels, mask = data[IDS], None if name is None else data[name], data.get(MASK)
    ids = torch.as_tensor(ids)
    if ids.ndim != 2 or ids.is_floating_point():
        raise ShapeError(f"tokens must be whole numbers [N, T], not {ids.dtype} {list(ids.shape)}")
    y = ids.long() if labels is None else torch.as_tensor(labels).long()
    counted = torch.ones_like(ids, dtype=torch.bool)
    if mask is not None:
        counted = torch.as_tensor(mask).to(ids.device) != 0
    for what, given in (("labels", y), ("attention_mask", counted)):
        if given.shape != ids.shape:
            raise ShapeError(f"{what} have the shape {list(given.shape)}, tokens {list(ids.shape)}")
    following = counted[:, 1:] & counted[:, :-1] & (y[:, 1:] != IGNORED)
    moved = torch.full_like(y, ignore_index)
    moved[:, :-1] = torch.where(following, y[:, 1:], ignore_index)
    return x, moved


def pad(rows: Sequence[Mapping[str, Any]], token: int = 0, side: str = "right") -> dict[str, Any]:
    """Make one batch of rows of different lengths. It can be the `collate_fn` of a `DataLoader`.

    Entries that are not numbers, such as text, are dropped. If rows have "input_ids" and no
    "attention_mask", the mask is added, so that all batches have the same entries.

    Parameters
    ----------
    rows : sequence of dict
        Rows with numbers, lists or tensors: {"input_ids": [5, 6, 7], "label": 1}.
    token : int, default 0
        The token of padding. Labels are padded with −100, and all other entries with 0.
    side : str, default "right"
        The side of the padding: "right" or "left".

    Returns
    -------
    dict of Tensor
        Tensors [N, ...].
    """
    if side not in ("right", "left"):
        raise DataError(f"side must be 'right' or 'left', not {side!r}")
    table: list[dict[str, Any]] = [
        {name: _numbers(part) for name, part in row.items()} for row in rows
    ]
    names = [name for name in table[0] if all(row.get(name) is not None for row in table)]
    if IDS in names and MASK not in names:
        names.append(MASK)
        for row in table:
            row[MASK] = torch.ones_like(row[IDS], dtype=torch.long)
    value = {IDS: token, **dict.fromkeys(LABELS, IGNORED)}
    return {
        name: stacked([row[name] for row in table], name, value.get(name, 0), side)
        for name in names
    }


def collate(rows: list[Any]) -> Any:
    """Make a batch of the rows of a dataset. If rows are dicts with lists, the lists are sequences,
    and are padded. The default of torch would make one tensor per position."""
    first = rows[0]
    lists = isinstance(first, Mapping) and any(isinstance(v, list | str) for v in first.values())
    return pad(rows) if lists else default_collate(rows)


def _numbers(part: Any) -> Tensor | None:
    """An entry of a row as a tensor; None if it is not numbers."""
    try:
        return torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError):
        return None


def stacked(parts: Sequence[Tensor], name: str, value: int, side: str = "right") -> Tensor:
    """Stack one tensor per row. Rows are padded with `value` on their first axis, to the longest.
    `name` is the name of the entry in error messages."""
    if len({part.shape for part in parts}) == 1:
        return torch.stack(list(parts))
    if len({part.shape[1:] for part in parts if part.ndim}) > 1 or any(not p.ndim for p in parts):
        shapes = sorted({tuple(part.shape) for part in parts})
        raise DataError(f"{name!r} of some rows has the shapes {shapes}: they fit no batch")
    longest = max(len(part) for part in parts)
    full = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), value)
    for row, part in zip(full, parts, strict=True):
        row[slice(0, len(part)) if side == "right" else slice(longest - len(part), None)] = part
    return full


def joined(batches: Sequence[Any]) -> Any:
    """Join batches of inputs whose sequences have different lengths, because a loader pads each
    batch on its own. The sequences are padded on the right to the longest. None if the batches are
    not dicts, or have the same shapes, and need no padding."""
    first = batches[0]
    if not isinstance(first, dict) or all(_shapes(batch) == _shapes(first) for batch in batches):
        return None
    full: dict[str, Tensor] = {}
    for name in first:
        rows = [row for batch in batches for row in batch[name].unbind(0)]
        full[name] = stacked(rows, name, 0)
    return full


def _shapes(batch: Mapping[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(part.shape[1:]) for part in batch.values() if isinstance(part, Tensor)]
