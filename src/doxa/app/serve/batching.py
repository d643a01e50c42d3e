"""One thread that predicts, and the queue of requests before it.

Requests that wait are taken together: the thread takes the first, waits `wait` seconds for others,
and predicts their rows as one batch. While it predicts, the next requests gather. A request whose
client has given up (its deadline has passed) is dropped when its turn comes.

What a batch changes: a matrix product with other rows may be computed by another routine, so that
the last bits of a float32 number differ (a relative 1e-6). With `exact`, each request is predicted
by itself, by the same calls in the same order as alone: its answer has the same bits whatever else
is asked, and those of `doxa.tables.predictions.predict_frame` in a process with as many threads.

A posterior that draws jointly over its rows (samples of a process) would give a row other draws in
another batch, which is more than rounding. `depends_on_company` finds that out on a few rows, and
such a posterior is served as with `exact`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from doxa.errors import NumericalError
from doxa.tables.predictions import ROWS_AT_ONCE, predict_inputs
from doxa.tables.reading import Array
from doxa.tables.schema import Schema

logger = logging.getLogger(__name__)

Columns = dict[str, Array]
_PROBE = 8  # rows


@dataclass
class RequestRows:
    """The rows of one request, encoded as inputs, with what its answer needs."""

    x: Array
    level: float | None = None
    label: tuple[str, list[Any]] | None = None  # the column that names the rows
    notes: list[str] = field(default_factory=list)
    by_column: bool = False  # how JSON gave the rows, and gets the answer


@dataclass
class _Job:
    read: Callable[[], RequestRows]
    write: Callable[[RequestRows, Columns], bytes]
    answer: Future[bytes]


class Batcher:
    """The thread that reads, predicts and writes.

    Parameters
    ----------
    posterior : Posterior
        What predicts.
    schema : Schema
        Its columns.
    exact : bool
        Predict each request by itself.
    wait : float
        Seconds for other requests to join the first of a batch.
    rows : int
        The most rows of a batch: no request joins once it has as many.
    threads : int
        Threads of torch.
    """

    def __init__(
        self,
        posterior: Any,
        schema: Schema,
        exact: bool = False,
        wait: float = 0.002,
        rows: int = ROWS_AT_ONCE,
        threads: int = 1,
    ) -> None:
        self._posterior, self._schema = posterior, schema
        self._wait, self._rows, self._threads = wait, rows, threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.batches = self.requests = self.dropped = 0
        self.exact = exact
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="doxa-predict", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    def submit(
        self, read: Callable[[], RequestRows], write: Callable[[RequestRows, Columns], bytes]
    ) -> Future[bytes]:
        """The answer to one request, which `read` decodes and `write` encodes, both in the thread.
        Cancelling it drops the request, if its turn has not come."""
        answer: Future[bytes] = Future()
        self._jobs.put(_Job(read, write, answer))
        return answer

    def close(self, seconds: float | None = None) -> None:
        """End the thread when what is in the queue is answered; wait for that so long at most."""
        self._jobs.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            if not self.exact and depends_on_company(self._posterior, self._schema):
                self.exact = True
                logger.warning(
                    "a row's prediction depends on the other rows beyond rounding: each request is "
                    "predicted by itself, as with --exact"
                )
        except Exception:  # rows of zeros may be none that it predicts
            logger.info("requests are not batched: the test of it failed", exc_info=True)
            self.exact = True
        self._ready.set()
        while (first := self._jobs.get()) is not None:
            open_ = self._batch(first)
            if not open_:
                return

    def _batch(self, job: _Job | None) -> bool:
        """Answer a request and those that join it; False if the end of the queue was among them."""
        until = time.monotonic() + (0.0 if self.exact else self._wait)
        taken: list[tuple[_Job, RequestRows]] = []
        rows = 0
        while job is not None:
            if (asked := self._read(job)) is not None:
                taken.append((job, asked))
                rows += len(asked.x)
            if rows >= self._rows or self.exact:
                break
            try:
                left = until - time.monotonic()
                job = self._jobs.get(timeout=left) if left > 0 else self._jobs.get_nowait()
            except queue.Empty:
                break
        levels = {asked.level for _, asked in taken}
        for level in sorted(levels, key=lambda v: (v is not None, v)):
            self._answer([pair for pair in taken if pair[1].level == level], level)
        return job is not None

    def _read(self, job: _Job) -> RequestRows | None:
        if not job.answer.set_running_or_notify_cancel():
            self.dropped += 1
            return None
        self.requests += 1
        try:
            return job.read()
        except BaseException as error:
            job.answer.set_exception(error)
            return None

    def _answer(self, pairs: list[tuple[_Job, RequestRows]], level: float | None) -> None:
        """Predict the rows of some requests at once, and hand each its part."""
        self.batches += 1
        try:
            x = np.concatenate([asked.x for _, asked in pairs])
            found = predict_inputs(self._posterior, self._schema, x, level)
        except BaseException as error:
            if len(pairs) > 1:  # the fault of one request is not that of the others
                for pair in pairs:
                    self._answer([pair], level)
                return
            pairs[0][0].answer.set_exception(error)
            return
        start = 0
        for job, asked in pairs:
            end = start + len(asked.x)
            try:
                part = {name: values[start:end] for name, values in found.items()}
                job.answer.set_result(job.write(asked, part))
            except BaseException as error:
                job.answer.set_exception(error)
            start = end


def depends_on_company(posterior: Any, schema: Schema) -> bool:
    """Whether a row is predicted otherwise beside other rows, by more than rounding."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_PROBE, schema.inputs))
    together = predict_inputs(posterior, schema, x)
    alone = [predict_inputs(posterior, schema, x[k : k + 1]) for k in range(_PROBE)]
    for name, values in together.items():
        if values.dtype.kind != "f":
            continue
        apart = np.array([one[name][0] for one in alone])
        scale = np.abs(values).max(initial=0.0)
        if not np.isfinite(scale):
            raise NumericalError(f"the predicted {name!r} of a made-up row is not finite")
        if (np.abs(values - apart) > 0.01 * (np.abs(values) + 0.1 * scale)).any():
            return True
    return False
