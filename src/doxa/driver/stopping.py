"""Early stopping: the rows that are held out say when training has gone on long enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from doxa.data import Batch, Data, Pass, halved
from doxa.driver.progress import Progress, chosen, copied
from doxa.method import Method, Run, State, slice_state


@dataclass(frozen=True)
class EarlyStopping:
    """Looks at the held-out rows now and then, keeps each member's best state, and says when no
    member may improve: `patience` looks have passed without a gain of any."""

    run: Run
    method: Method
    patience: int
    intervals: list[int]  # steps between the looks of each member
    steps: int  # of the stage, after which all are looked at

    @classmethod
    def of(cls, run: Run, method: Method, steps: int, patience: int) -> EarlyStopping | None:
        """A look an epoch of each member's rows, and a hundredth of the stage at least; None where
        there is nothing to look at."""
        data = run.data
        if not isinstance(data, Data) or data.validation is None:
            return None
        least = math.ceil(steps / 100)
        epochs = [max(least, len(rows) // run.settings.batch_size) for rows in data.rows]
        return cls(run, method, patience, [epochs[s] for s in run.split_of], steps)

    def ends(self, at: Progress) -> bool:
        """Score the current parameters on the held-out rows, if some member is due; True when none
        may improve. A member that is not due, has waited long enough or diverged keeps its best."""
        due = [at.t == self.steps or at.t % interval == 0 for interval in self.intervals]
        if not any(due):
            return False
        run = self.run
        held = run.rows.held_out_rows()
        rows = Pass(held, run.split_of, 4096)
        total = torch.zeros(run.size, device=run.device, dtype=run.dtype)
        with torch.no_grad():
            for t in range(rows.count):
                batch = rows.batch(t)
                total += self._score(at.state, halved(batch) if held.tasks else batch)
        scores = total.cpu().tolist()
        if not at.best:
            at.best = copied(at.state)
            at.best_score, at.waited = [-math.inf] * run.size, [0] * run.size
            at.best_step = [at.done] * run.size
        better = [
            due[m] and scores[m] > at.best_score[m]
            and at.waited[m] < self.patience and m not in at.diverged
            for m in range(run.size)
        ]  # fmt: skip
        at.best = chosen(torch.tensor(better, device=run.device), at.state, at.best)
        at.best_score = [
            s if b else o for s, o, b in zip(scores, at.best_score, better, strict=True)
        ]
        at.best_step = [at.done if b else t for t, b in zip(at.best_step, better, strict=True)]
        at.waited = [0 if b else w + d for b, w, d in zip(better, at.waited, due, strict=True)]
        at.history.setdefault("validation", []).append([at.done, scores])
        return min(at.waited) >= self.patience

    def _score(self, state: State, batch: Batch) -> Tensor:
        """The log-likelihood of some rows under each member's current weights, [M]."""
        run, score, scores = self.run, self.method.score, []
        for part in run.engine.chunks(run.size):
            scores.append(score(run.part(part), slice_state(state, part), batch.members(part)))
        return scores[0] if len(scores) == 1 else torch.cat(scores)
