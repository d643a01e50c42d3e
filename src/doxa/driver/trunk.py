"""The outputs of a frozen trunk, computed once for the rows of a fit.

    f(x; θ) = head(trunk(x); θ):   the stages run on φ_i = trunk(x_i) in place of x_i

During the fit, the network is the trained part alone (`model/trunk.py`), and its inputs are φ. This
holds for training, for the held-out rows, and for the passes that compute curvature. The evaluation
after training and the posterior use the whole network and the user's x again. The results are the
same as without stored outputs, up to rounding.

**Storage.** Outputs are kept in memory, on the device of the fit, if they take at most a quarter of
the free memory. Larger ones are kept in a file without a name, which the system removes when the
fit ends. If the user names a folder, the outputs stay there for later fits. Their name in it is a
hash of the rows, of the trunk's tensors and of the type.

**Exceptions.** The trunk is computed in every pass in three cases. First, if the disk is full.
Second, if a method reads x itself (`Method.reads_inputs`). Third, if the outputs are not a function
of the row: a Dataset may augment its rows, or a trunk may draw random numbers. To detect this, the
first rows are read twice and passed twice, and both times must give the same bits.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from doxa import store
from doxa.data import Data, free_memory
from doxa.driver.setup import select_engine
from doxa.engine.engine import Count, threads_for
from doxa.errors import StoreError
from doxa.method import Method, Run
from doxa.model.trunk import Split
from doxa.store.tensors import bytes_of

log = logging.getLogger("doxa")

_BLOCK_BYTES = 8 << 20  # bytes of the widest activation in one pass; 64 times this on a GPU
_MOST_ROWS = 512  # largest number of rows in one pass
_COMPARED = 64  # largest number of rows that are read and passed twice


@dataclass
class TrunkOutputs:
    """The outputs of trunks, shared by all fits of one call of `doxa.fit`.

    Parameters
    ----------
    keep : bool, str or Path
        Whether the outputs are computed once. A path is a folder in which they also stay for later
        fits.
    """

    keep: bool | str | Path = True
    _found: list[tuple[Data, Split, Data, str]] = field(default_factory=list)

    def trained(self, run: Run, method: Method) -> Run:
        """Replace a run by that of the trained part on the outputs of the frozen trunk.

        Parameters
        ----------
        run : Run
            The run of the whole network on the user's data.
        method : Method
            The method.

        Returns
        -------
        Run
            The run of the trained part, or the given run if the outputs are not computed once. Its
            engine is the requested one, or is selected again for this run.
        """
        short = self._shortened(run, method)
        engine = select_engine(short, run.settings.engine, method, run.engine.precision)
        return replace(short, engine=engine)

    def _shortened(self, run: Run, method: Method) -> Run:
        data = run.data
        if self.keep is False:
            return run
        if isinstance(data, Data) and data.stream is not None:
            log.info("the frozen trunk is computed in every pass: the rows are not in memory")
            return run
        if not isinstance(data, Data) or data.tasks or method.reads_inputs(run):
            name = method.name
            log.info("the frozen trunk is computed in every pass: %s reads the inputs", name)
            return run
        x, _ = data.take(data.rows[0][:2], torch.tensor(0))
        split = run.net.split(x)
        found = None if split is None else self.of(run, split)
        if split is None or found is None:
            return run
        own, place = found
        log.info("the outputs of the frozen trunk are computed once for the data (%s)", place)
        one = own.take(own.rows[0][:1], torch.tensor(0))[0]
        return replace(
            run, problem=replace(run.problem, model=split.head), data=own, shortened_from=run,
            inputs=tree_map(lambda t: list(t.shape[1:]), one),
        )  # fmt: skip

    def of(self, run: Run, split: Split) -> tuple[Data, str] | None:
        """The data of a run with the trunk's outputs in place of x.

        Parameters
        ----------
        run : Run
            The run on the user's data.
        split : Split
            The trunk and the head of its network.

        Returns
        -------
        tuple of (Data, str) or None
            The data, and where the outputs are stored, as text. None if the outputs cannot be
            computed once; the reason is logged.
        """
        for rows, other, data, place in self._found:
            if _same_rows(rows, run.rows) and _same_trunk(other, split):
                own = replace(
                    data, rows=run.rows.rows, validation=run.rows.validation,
                    weight=run.rows.weight, given_weight=run.rows.given_weight,
                    owners=run.rows.owners, group=run.rows.group, evaluation=run.rows.evaluation,
                    scales=[_of_y(s) for s in run.rows.scales],
                )  # fmt: skip
                return own, place
        found = _computed(run, split, self.keep)
        if isinstance(found, str):
            log.warning("the frozen trunk is computed in every pass: %s", found)
            return None
        self._found.append((run.rows, split, *found))
        return found


def _same_rows(one: Data, other: Data) -> bool:
    """Whether two data sets have the same inputs and targets, in fitted units."""
    if one is other or (one.source is not None and one.source is other.source):
        return True
    if one.source is not None or other.source is not None:
        return False
    if one.scaled_per_run != other.scaled_per_run or (one.lazy or other.lazy):
        return False
    pairs = zip(*(tree_flatten((d.x, d.y))[0] for d in (one, other)), strict=False)
    return all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)


def _same_trunk(one: Split, other: Split) -> bool:
    if one is other:
        return True
    if (one.tail, one.trunk) != (other.tail, other.trunk):
        return False
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def _of_y(scale: Any) -> Any:
    return replace(scale, x_loc=None, x_scale=None)


def _computed(run: Run, split: Split, keep: bool | str | Path) -> tuple[Data, str] | str:
    """The data with the trunk's outputs and where these are stored, or the reason why they are not
    computed once."""
    data = run.rows
    several = len({id(s.x_loc) for s in data.scales}) > 1
    if data.lazy and several:
        return "the rows are large, and each run scales them in its own way"
    first = torch.arange(min(data.total, _COMPARED, _rows_per_pass(run)))
    (x, _), (again, _) = (data.take(first, torch.tensor(0)) for _ in range(2))
    if not _equal(x, again):
        return "the same rows of the data differ between two reads (random augmentation?)"
    with Count() as count:
        features = split.features(x)
    with threads_for(count.largest):
        if not _equal(features, split.features(x)):
            return "two passes over the same rows do not give the same bits"
        folder = None if isinstance(keep, bool) else Path(keep)
        path = None if folder is None else folder / _key(run, split)
        budget = free_memory(data.device) // 4
        try:
            if path is not None and store.is_artefact(path):
                tensors = store.read_artefact(path, budget)[0]
                leaves = [tensors[str(i)] for i in range(len(tensors))]
                place = f"read from {path}"
            else:
                leaves, place = _filled(run, split, features, budget)
                if path is not None:
                    named = {str(i): leaf for i, leaf in enumerate(leaves)}
                    store.write_artefact(path, named, {"format": 1, "kind": "trunk outputs"})
                    place = f"{place}, and kept in {path}"
        except StoreError as error:
            return f"{error}"
    one, spec = tree_flatten(features)
    fits = [
        leaf.dtype == own.dtype and leaf.shape[1:] == own.shape[1:]
        and torch.equal(leaf[: len(own)].to(own.device), own)
        for leaf, own in zip(leaves, one, strict=True)
    ]  # fmt: skip
    if not all(fits):
        return f"{path} holds other numbers than the network's; remove it"
    if sum(leaf.nbytes for leaf in leaves) <= budget:
        leaves = [leaf.to(data.device) for leaf in leaves]
    y = data.y
    if data.source is not None:
        y = _targets(data)
    found = replace(
        data, x=tree_unflatten(leaves, spec), y=y, source=None,
        scales=[_of_y(s) for s in data.scales],
    )  # fmt: skip
    return found, place


def _filled(run: Run, split: Split, first: Any, budget: int) -> tuple[list[Tensor], str]:
    """The trunk's outputs at all rows, in memory or in a file, and where they are, as text. `first`
    are the outputs at the first rows."""
    data = run.rows
    shapes = [(leaf.shape[1:], leaf.dtype) for leaf in tree_flatten(first)[0]]
    count = data.total * (len(data.scales) if data.scaled_per_run else 1)
    size = count * sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)
    if size <= budget:
        leaves = [
            torch.empty((count, *shape), dtype=dtype, device=data.device) for shape, dtype in shapes
        ]
        at = 0
        for part in _passes(run, split, first):
            for leaf, own in zip(leaves, part, strict=True):
                leaf[at : at + len(own)] = own
            at += len(part[0])
        return leaves, f"in memory, {size / 2**20:.3g} MiB"
    files = [store.DrawsFile((1, count, shape.numel()), dtype) for shape, dtype in shapes]
    for part in _passes(run, split, first):
        for file, own in zip(files, part, strict=True):
            file.extend(own.flatten(1))
    leaves = [
        f.tensor()[0].unflatten(1, shape) for f, (shape, _) in zip(files, shapes, strict=True)
    ]
    return leaves, f"on disk, {size / 2**20:.3g} MiB"


def _passes(run: Run, split: Split, first: Any) -> Iterator[list[Tensor]]:
    """The trunk's outputs at all rows, in order and in blocks. The first block is given."""
    leaves = tree_flatten(first)[0]
    yield leaves
    for x, _ in _blocks(run.rows, _rows_per_pass(run), len(leaves[0])):
        yield tree_flatten(split.features(x))[0]


def _blocks(data: Data, size: int, begin: int = 0) -> Iterator[tuple[Any, Any]]:
    """(x, y) of all rows, in order, in blocks of `size` rows. If each run scales x in its own way,
    the rows of all runs follow each other. The first `begin` rows of the first run are skipped."""
    for r in range(len(data.scales) if data.scaled_per_run else 1):
        for start in range(0 if r else begin, data.total, size):
            rows = torch.arange(start, min(start + size, data.total))
            yield data.take(rows, torch.tensor(r))


def _targets(data: Data) -> Any:
    """The targets of all rows of a `Dataset` or another source, which is read from start to end."""
    each = [y for _, y in _blocks(data, _MOST_ROWS)]
    return tree_map(lambda *t: torch.cat(t), *each)


def _rows_per_pass(run: Run) -> int:
    row = run.net.width() * run.dtype.itemsize
    most = _BLOCK_BYTES if run.device.type == "cpu" else 64 * _BLOCK_BYTES
    return max(1, min(_MOST_ROWS, most // max(1, row)))


def _equal(one: Any, other: Any) -> bool:
    leaves = zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=True)
    return all(torch.equal(a, b) for a, b in leaves)


def _key(run: Run, split: Split) -> str:
    """The name of the stored outputs: a hash of the rows, the trunk's tensors and the type."""
    digest = hashlib.sha256(f"{split.trunk} {split.tail} {run.dtype} {torch.__version__}".encode())
    add: Callable[[Tensor], None] = lambda t: digest.update(bytes_of(t))  # noqa: E731
    for name, tensor in split.tensors().items():
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        add(tensor)
    for x, _ in _blocks(run.rows, _MOST_ROWS):
        for leaf in tree_flatten(x)[0]:
            digest.update(f"{list(leaf.shape)} {leaf.dtype}".encode())
            add(leaf)
    return digest.hexdigest()[:32]
