"""`Watch`: do new rows still fit the certificate of a posterior?

Three tests run over the rows as they come (`evaluate/betting.py`). Each may be looked at after
every row.

    coverage   H₀: the coverage of intervals is at least the lower end of the certificate's interval
    scores     H₀: the share of log densities below the certificate's 5 % quantile is at most the
               upper end of its interval
    inputs     H₀: inputs and the reference of the certificate are exchangeable

The first two share the level: if both hypotheses hold, one of them raises an alarm with probability
`level` at most, over all time. Rows need not be independent for this: it is enough that each row,
given those before it, is held or low with such a probability. The test of inputs has the level for
itself. It compares the columns of x; and, if the certificate is of test rows, the mean square of
the standardised columns and the epistemic uncertainty. Columns that shift together without shifting
by themselves are not noticed.

Targets may come later than inputs. Rows that belong together, as those of one machine, count as one
row: their mean is a number in [0, 1], whose expectation has the same bound. Their first row is
compared by its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa import store
from doxa.data import as_tensors, rows_of
from doxa.data.fitted_rows import input_columns, watched_inputs
from doxa.driver.validation import FEWEST_EVALUATED, evaluate_rows, row_scores
from doxa.errors import DataError, StoreError, Unavailable
from doxa.evaluate.betting import (
    BETS,
    Evidence,
    conformal_p,
    evidence,
    mean_bets,
    shape_bets,
)
from doxa.noise import generator
from doxa.posterior import Posterior
from doxa.posterior.certificate import Certificate, input_scores

FORMAT = 1
_ROWS = 8192  # rows that are predicted at a time
_MOST_BOUND = 0.999  # a larger share of misses cannot be exceeded by much


@dataclass(frozen=True)
class Alarm:
    """When a test raised an alarm.

    Attributes
    ----------
    test : str
        "coverage", "scores" or "inputs".
    row : int
        The number of rows (of groups, if there are any) that the test had seen, this one included.
    place : str
        The row in its data: "row 12 of new.csv".
    date : str
        The date on which it was counted.
    what : str
        The input with the most evidence; "" for the other tests.
    """

    test: str
    row: int
    place: str
    date: str
    what: str = ""


@dataclass
class WatchedTest:
    """One test: its evidence, and what it has seen."""

    name: str
    level: float
    bound: float | None = None  # the largest mean under the hypothesis
    rows: int = 0
    total: float = 0.0  # the sum of the numbers that were tested
    log_m: float = 0.0
    peak: float = 0.0  # the largest log_m
    alarm: Alarm | None = None
    log_s: Tensor | None = None

    @property
    def e_value(self) -> float:
        """The evidence against the hypothesis: an alarm is raised where it reaches 1/level."""
        return exp(min(self.log_m, 700.0))

    @property
    def mean(self) -> float | None:
        """The mean of the numbers that were tested: the share of misses, or of low scores."""
        return self.total / self.rows if self.rows and self.bound is not None else None

    def add(self, found: Evidence, total: float, places: Sequence[str], date: str) -> int | None:
        """Take over new evidence. Returns the number of the row among these that raised an alarm,
        if it is the first one."""
        before, self.rows = self.rows, found.rows
        self.total += total
        self.log_s = found.log_s
        self.log_m = float(found.log_m[-1])
        self.peak = max(self.peak, float(found.log_m.max()))
        over = (found.log_m >= -log(self.level)).nonzero()
        if self.alarm is not None or not len(over):
            return None
        first = int(over[0])
        self.alarm = Alarm(self.name, before + first + 1, places[first], date)
        return first


class Watch:
    """Compare new rows with the certificate of a posterior, as they come.

    Parameters
    ----------
    posterior : Posterior
        A posterior with a certificate: `doxa fit --test`, or any fit with held-out rows. Without
        one, only the inputs are watched; the level of a conformal posterior takes its place.
    level : float, default 0.05
        The largest probability of a false alarm over all time: of coverage and scores together,
        and of the inputs.

    Attributes
    ----------
    tests : dict
        The tests by name, each with `rows`, `mean`, `e_value`, `level` and `alarm`.
    alarms : list of Alarm
        All alarms until now. An alarm stays.
    pending : int
        The number of rows whose target has not come.

    Examples
    --------
    >>> import torch, doxa
    >>> source = torch.Generator().manual_seed(0)
    >>> x = torch.randn(900, 1, generator=source)
    >>> y = 2 * x[:, 0] + torch.randn(900, generator=source)
    >>> posterior = doxa.fit(None, (x[:100], y[:100]), "linear")
    >>> certificate = doxa.evaluate.certify(posterior, (x[100:400], y[100:400]))
    >>> watch = doxa.evaluate.Watch(posterior)
    >>> watch.update(x[400:], y[400:])
    []
    >>> watch.update(x[400:] + 3.0, y[400:], name="moved")[0].test
    'coverage'
    """

    def __init__(self, posterior: Posterior, level: float = 0.05) -> None:
        if not 0.0 < level < 1.0:
            raise DataError(f"level must lie between 0 and 1, not {level}")
        self.posterior, self.level = posterior, level
        self.certificate, self.reference = posterior.certificate, posterior.input_reference
        self.tests: dict[str, WatchedTest] = {}
        self.names: list[str] = []  # of the inputs that are compared
        self.seen_data: dict[str, str] = {}  # {digest: name}
        self._groups: dict[str, dict[str, None]] = {"inputs": {}, "targets": {}}  # counted
        self._seen_keys: dict[str, None] = {}
        self._waiting: dict[str, tuple[Tensor, str, str]] = {}  # {key: (x, group, place)}
        self._values: Tensor | None = None  # of the inputs of all new rows, [rows, K]
        self._set_up()

    def _set_up(self) -> None:
        found, transform = self.certificate, self.posterior.transform
        bounds = {}
        if found.coverage is not None:
            bounds["coverage"] = 1.0 - found.coverage.low
        elif transform is not None and transform.guaranteed_level is not None:
            bounds["coverage"] = 1.0 - transform.guaranteed_level
        if found.low_share is not None:
            bounds["scores"] = found.low_share.high
        for name, bound in bounds.items():
            share = self.level / len(bounds)
            self.tests[name] = WatchedTest(name, share, min(max(bound, 1e-6), _MOST_BOUND))
        if self.reference is not None:
            self.tests["inputs"] = WatchedTest("inputs", self.level)
        if not self.tests:
            raise Unavailable(
                "there is nothing to watch: no rows evaluated this posterior, and its inputs are "
                "no table of numbers; evaluate it with test rows (doxa fit --test, or "
                "doxa.evaluate.certify)"
            )

    @property
    def alarms(self) -> list[Alarm]:
        return [test.alarm for test in self.tests.values() if test.alarm is not None]

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def update(
        self, x: Any, y: Any = None, *, groups: Sequence[Any] | None = None,
        keys: Sequence[Any] | None = None, labelled: Sequence[bool] | None = None,
        name: str = "the rows", places: Sequence[str] | None = None, digest: str = "",
        date: str | None = None,
    ) -> list[Alarm]:  # fmt: skip
        """Count new rows, in their order.

        Parameters
        ----------
        x : array, Tensor or data frame
            Inputs, as in `predict`.
        y : array or Tensor, optional
            Targets. Without them, only the inputs are compared; `label` adds the targets later.
        groups : sequence, optional
            The group of each row. The rows of a group count as one. Rows of a group that was
            counted in an earlier call are not counted.
        keys : sequence, optional
            The name of each row, by which its target is found later. A row whose name was counted
            before is not counted.
        labelled : sequence of bool, optional
            Which rows of y are known; default: all.
        name : str, default "the rows"
            What messages call these rows.
        places : sequence of str, optional
            What messages call each row. Default: "row 0 of …".
        digest : str, optional
            The fingerprint of the data. Data with the fingerprint of earlier data are not counted.
        date : str, optional
            The date of alarms; default: today.

        Returns
        -------
        list of Alarm
            The alarms that these rows raised.
        """
        if digest and digest in self.seen_data:
            return []
        before = self.alarms
        x = self.posterior.read(x)
        count = rows_of(x, "x")
        if count == 0:
            return []
        date = date or datetime.now(UTC).date().isoformat()
        places = [f"row {k} of {name}" for k in range(count)] if places is None else list(places)
        known = torch.ones(count, dtype=torch.bool)
        if y is None:
            known[:] = False
        elif labelled is not None:
            known = torch.as_tensor(labelled, dtype=torch.bool)
        group = self._named("groups", groups, count)
        key = self._named("keys", keys, count)
        if len(set(key)) < len(key):
            twice = next(each for each in key if key.count(each) > 1)
            raise DataError(f"the key {twice!r} stands at more than one row: keys name single rows")
        use = [k for k in range(count) if not (key and key[k] in self._seen_keys)]
        self._inputs(x, group, use, places, date)
        have = [k for k in use if known[k]]
        if have:
            index = torch.tensor(have)
            targets = _take(as_tensors(y, "y"), index)
            own = [group[k] for k in have] if group else []
            self._targets(_take(x, index), targets, own, [places[k] for k in have], date)
        for k in use if key else ():
            self._seen_keys[key[k]] = None
            if not known[k]:
                self._waiting[key[k]] = (_row(x, k), group[k] if group else "", places[k])
        if digest:
            self.seen_data[digest] = name
        return [alarm for alarm in self.alarms if alarm not in before]

    def label(
        self, keys: Sequence[Any], y: Any, *, name: str = "the labels", digest: str = "",
        date: str | None = None,
    ) -> int:  # fmt: skip
        """Count the targets of rows that came before without one, in the order of `keys`.

        Returns
        -------
        int
            The number of targets that were counted. Keys that no row waits for are skipped.
        """
        if digest and digest in self.seen_data:
            return 0
        names = [str(each) for each in keys]
        if len(set(names)) < len(names):
            raise DataError(f"{name} have the target of one row more than once")
        chosen = [k for k, each in enumerate(names) if each in self._waiting]
        if chosen:
            rows = [self._waiting[names[k]] for k in chosen]
            x = torch.stack([row[0] for row in rows])
            targets = _take(as_tensors(y, "y"), torch.tensor(chosen))
            day = date or datetime.now(UTC).date().isoformat()
            group = [row[1] for row in rows]
            self._targets(x, targets, group if any(group) else [], [r[2] for r in rows], day)
            for k in chosen:
                del self._waiting[names[k]]
        if digest:
            self.seen_data[digest] = name
        return len(chosen)

    @staticmethod
    def _named(what: str, given: Sequence[Any] | None, count: int) -> list[str]:
        if given is None:
            return []
        if len(given) != count:
            raise DataError(f"{what} has {len(given)} entries for {count} rows")
        return [str(each) for each in given]

    def _inputs(
        self, x: Any, group: list[str], use: list[int], places: list[str], date: str
    ) -> None:
        """Compare the inputs of rows, of each group its first row, with all earlier ones."""
        state, reference = self.tests.get("inputs"), self.reference
        first = _first_of_groups(group, use, self._groups["inputs"])
        if state is None or reference is None or not first:
            return
        for some in torch.tensor(first).split(_ROWS):
            values = self._compared(_take(x, some), reference)
            before = [reference.cpu(), *([] if self._values is None else [self._values])]
            earlier = torch.cat(before)
            self._values = torch.cat([*before[1:], values])
            source = generator(self.posterior.record.seed, "watch", "ties", state.rows)
            ties = torch.rand(values.shape, generator=source, dtype=torch.float64)
            log_e = shape_bets(conformal_p(values, earlier, ties).T).flatten(0, 1)  # [K BETS, T]
            log_s, rows = state.log_s, state.rows
            found = evidence(log_e, log_s, rows)
            at = state.add(found, 0.0, [places[k] for k in some.tolist()], date)
            if at is not None and state.alarm is not None:
                until = evidence(log_e[:, : at + 1], log_s, rows)
                best = int(until.log_s.reshape(-1, BETS).logsumexp(1).argmax())
                name = self._input_name(best, values.shape[1])
                state.alarm = replace(state.alarm, what=name)

    def _compared(self, x: Any, reference: Tensor) -> Tensor:
        """The numbers of rows that are compared with the reference, [N, K]."""
        columns = input_columns(x)
        if columns is not None and columns.shape[1] == reference.shape[1]:
            return columns
        found = input_scores(self.posterior, x, self._predict(x))
        if found is None or found.shape[1] != reference.shape[1]:
            raise DataError("the inputs have another number of columns than the certificate has")
        return found

    def _input_name(self, k: int, scores: int) -> str:
        """What the k-th of the numbers that are compared is called."""
        width = (self.posterior.inputs or [0])[0]
        columns = watched_inputs(width) if isinstance(width, int) and width else []
        if k < len(columns):
            names = self.names or self.posterior.columns
            return str(names[columns[k]]) if names else f"input {columns[k]}"
        distance = scores - len(columns) == 2 and k == len(columns)
        return "distance of the inputs" if distance else "epistemic uncertainty"

    def _targets(self, x: Any, y: Any, group: list[str], places: list[str], date: str) -> None:
        """Count the misses and the low scores of rows with their targets."""
        tests = [self.tests[name] for name in ("coverage", "scores") if name in self.tests]
        seen = self._groups["targets"]
        use = [k for k in range(len(places)) if not (group and group[k] in seen)]
        if not tests or not use:
            return
        chosen = torch.tensor(use)
        x, y = _take(x, chosen), _take(y, chosen)
        found: dict[str, list[Tensor]] = {"coverage": [], "scores": []}
        for some in torch.arange(len(use)).split(_ROWS):
            p, target = self._predict(_take(x, some)), _take(y, some)
            target = p.targets(target) if isinstance(target, Tensor) else target
            each = row_scores(p, target, self.posterior.base_likelihood)
            if "coverage" in self.tests:
                found["coverage"].append(1.0 - each["coverage"].detach().cpu().double())
            if "scores" in self.tests:
                score, low = each["log_prob"].detach().cpu().double(), self.certificate.low_score
                assert low is not None
                found["scores"].append((score < low).double())
        number = list(range(len(use)))  # of the group of each row, by the order of the groups
        if group:
            own = [group[k] for k in use]
            order = {name: k for k, name in enumerate(dict.fromkeys(own))}
            number = [order[name] for name in own]
            seen |= dict.fromkeys(own)
        last = {n: places[k] for n, k in zip(number, use, strict=True)}
        index = torch.tensor(number)
        size = torch.bincount(index).double()
        for state in tests:
            values = torch.bincount(index, torch.cat(found[state.name])) / size
            assert state.bound is not None
            bets = mean_bets(values, state.bound)
            total = float(values.sum())
            state.add(evidence(bets, state.log_s, state.rows), total, list(last.values()), date)

    def _predict(self, x: Any) -> Any:
        return self.posterior.predict(x)

    def save(self, path: str | Path) -> None:
        """Write the state as a folder, atomically and with checksums."""
        tensors: dict[str, Tensor] = {}
        for name, test in self.tests.items():
            if test.log_s is not None:
                tensors[f"evidence.{name}"] = test.log_s
        if self._values is not None:
            tensors["values"] = self._values
        if self._waiting:
            tensors["waiting"] = torch.stack([x for x, _, _ in self._waiting.values()])
        tests = {
            name: {k: v for k, v in vars(test).items() if k not in ("alarm", "log_s")}
            | {"alarm": None if test.alarm is None else asdict(test.alarm)}
            for name, test in self.tests.items()
        }
        meta = {
            "format": FORMAT, "kind": "watch", "level": self.level,
            "certificate": self.certificate.to_json()["sha256"], "tests": tests,
            "names": self.names, "data": self.seen_data, "keys": list(self._seen_keys),
            "groups": {name: list(each) for name, each in self._groups.items()},
            "waiting": [[key, group, at] for key, (_, group, at) in self._waiting.items()],
        }  # fmt: skip
        store.write_artefact(path, tensors, meta)

    @classmethod
    def load(cls, path: str | Path, posterior: Posterior) -> Self:
        """Read a saved state, to go on with the same posterior."""
        tensors, meta = store.read_artefact(path)
        with store.decoding(path):
            if meta.get("kind") != "watch" or meta.get("format") != FORMAT:
                raise StoreError(f"{path} holds no state of a watch that this doxa reads")
            watch = cls(posterior, meta["level"])
            if meta["certificate"] != watch.certificate.to_json()["sha256"]:
                raise StoreError(
                    f"{path} is the state of a watch of another run: its certificate differs; "
                    "give another folder for the state, or remove this one"
                )
            for name, saved in meta["tests"].items():
                test = watch.tests[name]
                for field in ("rows", "total", "log_m", "peak"):
                    setattr(test, field, type(getattr(test, field))(saved[field]))
                test.alarm = None if saved["alarm"] is None else Alarm(**saved["alarm"])
                test.log_s = tensors.get(f"evidence.{name}")
            watch.names, watch.seen_data = list(meta["names"]), dict(meta["data"])
            watch._seen_keys = dict.fromkeys(meta["keys"])
            watch._groups = {name: dict.fromkeys(each) for name, each in meta["groups"].items()}
            watch._values = tensors.get("values")
            rows = zip(meta["waiting"], tensors.get("waiting", ()), strict=True)
            watch._waiting = {key: (x, group, at) for (key, group, at), x in rows}
        return watch


def certify(posterior: Posterior, test: Any, name: str = "test rows") -> Certificate:
    """Evaluate a posterior on rows that the fit has not used, for its certificate and its status.

    Parameters
    ----------
    posterior : Posterior
        Its certificate and its status may be changed (`doxa.driver.validation.evaluate_rows`).
    test : tuple
        (x, y), at least 12 rows.
    name : str, default "test rows"
        What the certificate calls the rows.

    Returns
    -------
    Certificate
        That of the posterior, which `posterior.save` saves.
    """
    x, y = posterior.ordered_pair(test)
    if rows_of(as_tensors(x, "x"), "x") < FEWEST_EVALUATED:
        raise DataError(f"a certificate needs {FEWEST_EVALUATED} rows or more")
    evaluate_rows(posterior, x, y, name)
    return posterior.certificate


def _take(tree: Any, index: Tensor) -> Any:
    return tree_map(lambda t: t[index.to(t.device)], tree)


def _row(x: Any, k: int) -> Tensor:
    if not isinstance(x, Tensor):
        raise DataError("rows whose targets come later need inputs of one tensor")
    return x[k].detach().cpu()


def _first_of_groups(group: list[str], use: list[int], seen: dict[str, None]) -> list[int]:
    """The first row of each group that was not seen; every row where there are no groups."""
    if not group:
        return use
    first = []
    for k in use:
        if group[k] not in seen:
            seen[group[k]] = None
            first.append(k)
    return first
