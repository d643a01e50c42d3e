"""Language models: labels of next tokens, uncertainty per token, and generation.

`next_token` and `pad` make batches (`doxa/data/tokens.py`). A posterior of a network with logits
[N, T, C] predicts like any other. `p.probs` is [N, C, T], with the class axis before the positions,
and `p.entropy` and `p.mutual_information` are [N, T]. They have a value at every position, also at
padding, where it has no meaning. `per_token` replaces values at padding by NaN.

**Generation** (`generate`). The distribution of the next token is a mixture over the draws θ_s of
the weights, given the same tokens so far,

    p(t) = Σ_s w_s p(t | t_1 … t_k, θ_s),    H[p] = Σ_s w_s H[p_s] + I[t; θ]

where w_s are the weights of the posterior. They are not updated by the tokens generated so far. One
token is drawn from p, and is the same for all draws. All draws run at once, as in every prediction.
There is no cache of keys and values: each step runs the network on all tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.data import IGNORED, next_token, pad, without_labels
from doxa.data.tokens import IDS, MASK
from doxa.errors import MethodError, ShapeError, Unavailable
from doxa.noise import generator
from doxa.posterior import Posterior
from doxa.predictive import Predictive

__all__ = ["Generated", "TokenScores", "generate", "next_token", "pad", "per_token"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


@dataclass(frozen=True)
class TokenScores:
    """Scores per token of sequences, [N, T], in nats. They are NaN at ignored positions."""

    log_prob: Tensor
    """The log-probability of the label under the mixture of all draws."""
    entropy: Tensor
    """The entropy of the mixture, which is the expected entropy plus the mutual information."""
    expected_entropy: Tensor
    """The mean entropy of the draws, or aleatoric uncertainty, which more data do not reduce."""
    mutual_information: Tensor
    """The disagreement of the draws, or epistemic uncertainty."""
    counted: Tensor
    """True at the positions that are scored, where the label is not ignored."""

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return int(self.counted.sum())

    @property
    def nll(self) -> float:
        """The mean of −log p over the scored tokens."""
        return float(-self.log_prob.nanmean())

    @property
    def perplexity(self) -> float:
        """The perplexity, exp(nll)."""
        return math.exp(self.nll)


def per_token(p: Predictive, y: Any, ignore_index: int | None = None) -> TokenScores:
    """Score every token of labelled sequences.

    Parameters
    ----------
    p : Predictive
        A prediction with class probabilities [N, C, T].
    y : Tensor
        Labels [N, T].
    ignore_index : int, optional
        The label of positions that are not scored, such as padding. Default: that of the
        likelihood, or −100 if the likelihood has none.

    Returns
    -------
    TokenScores
        The scores, NaN at ignored positions.

    Examples
    --------
    >>> import torch, doxa
    >>> p = doxa.Predictive.from_probs(torch.full((1, 1, 4, 2), 0.25))
    >>> doxa.text.per_token(p, torch.tensor([[3, -100]])).log_prob
    tensor([[-1.3863,     nan]])
    """
    table = p.probs
    ignored = p.likelihood.ignore_index if ignore_index is None else ignore_index
    labels = torch.as_tensor(y).to(table.device)
    if table.ndim != 3 or labels.shape != (len(table), table.shape[2]):
        raise ShapeError(
            f"labels of shape {list(labels.shape)} do not fit probabilities of shape "
            f"{list(table.shape)}: labels are [N, T], and probabilities [N, C, T]"
        )
    counted = labels != (IGNORED if ignored is None else ignored)
    wrong = counted & ((labels < 0) | (labels >= table.shape[1]))
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise ShapeError(
            f"the label at row {row}, position {place} is {int(labels[row, place])}, and the "
            f"network has {table.shape[1]} classes; pass ignore_index= to ignore it"
        )
    chosen = torch.where(counted, labels, 0).long().unsqueeze(1)
    log_prob = table.gather(1, chosen).squeeze(1).log()

    def shown(values: Tensor) -> Tensor:
        return torch.where(counted, values, torch.nan)

    unknown = torch.full_like(p.entropy, torch.nan)
    expected = p.expected_entropy if p.splits else unknown
    information = p.mutual_information if p.splits else unknown
    return TokenScores(
        shown(log_prob), shown(p.entropy), shown(expected), shown(information), counted
    )


@dataclass(frozen=True)
class Generated:
    """Generated sequences, one per row. Rows that ended early are padded on the right."""

    tokens: Tensor
    """[N, T]: the prompt without its padding, then the generated tokens, then padding."""
    lengths: Tensor
    """[N]: the number of tokens of each row, including its prompt."""
    prompt_lengths: Tensor
    """[N]: the number of tokens of each prompt."""
    log_prob: Tensor
    """[N, steps]: the log-probability of each generated token under the mixture of all draws,
    before `temperature` and `top_k` are applied. It is NaN after the end of a row, as are `entropy`
    and `mutual_information`."""
    entropy: Tensor
    """[N, steps]: the entropy of the mixture from which each token was drawn."""
    mutual_information: Tensor
    """[N, steps]: the part of `entropy` that is disagreement of the draws."""


def generate(
    posterior: Posterior,
    prompt: Any,
    steps: int,
    *,
    n: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    end: int | None = None,
    pad_token: int = 0,
    seed: int | None = None,
) -> Generated:
    """Continue sequences with tokens drawn from the posterior predictive distribution.

    The network must be causal: the logits at a position must not depend on later tokens.

    Parameters
    ----------
    posterior : Posterior
        A posterior of a causal language model, with logits [N, T, C].
    prompt : Tensor or dict
        Tokens [N, T], or a dict with "input_ids" and, where prompts are padded, "attention_mask".
        Prompts may be padded on either side, and each has at least one token.
    steps : int
        The largest number of tokens that are generated per row.
    n : int, optional
        The number of draws of the weights, as in `predict`. All steps use the same draws.
    temperature : float, default 1.0
        Tokens are drawn with probabilities proportional to p^(1/temperature). With 0, the most
        probable token is taken.
    top_k : int, optional
        Tokens are drawn from the k most probable ones only.
    end : int, optional
        The token that ends a row.
    pad_token : int, default 0
        The token that fills the places after the end of a row.
    seed : int, optional
        The seed of the tokens and of the draws of the weights. Default: the seed of the fit.

    Returns
    -------
    Generated
        The tokens, and the log-probability, entropy and mutual information of each generated token.
    """
    steps = checks.whole("steps", steps)
    if not (isinstance(temperature, int | float) and 0 <= temperature < math.inf):
        raise MethodError(f"temperature must be a number of at least 0, not {temperature!r}")
    k = None if top_k is None else checks.whole("top_k", top_k)
    seed = posterior.sampling(n, seed, "samples")
    prompts = _Prompts.read(posterior, prompt, steps, pad_token)
    ids, lengths = prompts.ids, prompts.lengths.clone()
    rows = torch.arange(len(ids), device=ids.device)
    going = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    scores: list[Tensor] = []
    for step in range(steps):
        p = posterior.predict(prompts.inputs(ids, lengths), n=n, seed=seed)
        probs, entropy, information = (t.to(ids.device) for t in _at(p, lengths - 1))
        drawn = _draw(probs, temperature, k, generator("generate", seed, step))
        log_prob = probs[rows, drawn].log()
        each = torch.stack([log_prob, entropy, information])
        scores.append(torch.where(going, each, torch.nan))
        ids[rows[going], lengths[going]] = drawn[going]
        lengths = lengths + going.long()
        if end is not None:
            going = going & (drawn != end)
            if not bool(going.any()):
                break
    found = torch.stack(scores, 2)
    longest = int(lengths.max())
    return Generated(ids[:, :longest], lengths, prompts.lengths, *found)


@dataclass(frozen=True)
class _Prompts:
    """Prompts, without their padding, on the left of a table of tokens [N, T + steps], and the form
    of the inputs that the network takes."""

    ids: Tensor
    lengths: Tensor
    named: bool
    masked: bool
    whole: int | None  # the length of the fitted sequences; other lengths need named inputs

    @classmethod
    def read(cls, posterior: Posterior, prompt: Any, steps: int, pad_token: int) -> _Prompts:
        fitted = posterior.inputs
        named = isinstance(fitted, Mapping)
        given = dict(without_labels(prompt)) if isinstance(prompt, Mapping) else {IDS: prompt}
        if named and not {IDS} <= fitted.keys() <= {IDS, MASK}:
            raise Unavailable(
                "generation needs a network of 'input_ids', with or without 'attention_mask'; this "
                f"one takes {', '.join(map(repr, fitted))}"
            )
        given = {name: torch.as_tensor(part) for name, part in given.items()}
        old = given.get(IDS)
        if old is None or old.ndim != 2 or old.is_floating_point() or not old.numel():
            raise ShapeError("a prompt must be tokens [N, T], whole numbers, at least one per row")
        mask = given.get(MASK, torch.ones_like(old)).to(old.device) != 0
        if mask.shape != old.shape:
            raise ShapeError(f"the mask {list(mask.shape)} does not fit tokens {list(old.shape)}")
        lengths = mask.sum(1)
        if bool((lengths == 0).any()):
            raise ShapeError(f"the prompt of row {int(lengths.argmin())} has no token")
        order = (~mask).long().argsort(dim=1, stable=True)  # tokens first, in their order
        kept = torch.arange(old.shape[1], device=old.device) < lengths.unsqueeze(1)
        ids = old.new_full((len(old), old.shape[1] + steps), pad_token)
        ids[:, : old.shape[1]] = torch.where(kept, old.gather(1, order), pad_token)
        whole = None if named else int(fitted[0])
        if whole is not None and int(lengths.max()) + steps > whole + 1:
            raise ShapeError(
                f"the network was fitted to sequences of {whole} tokens, and without names its "
                f"inputs keep this length: prompts and steps may have {whole + 1} tokens; fit it "
                'to x={"input_ids": ids} for sequences of any length'
            )
        masked = MASK in fitted if named else False
        return cls(ids, lengths, named, masked, whole)

    def inputs(self, ids: Tensor, lengths: Tensor) -> Any:
        """The inputs of the network: the tokens so far, without columns that are all padding."""
        longest = int(lengths.max())
        if not self.named:
            assert self.whole is not None
            return torch.nn.functional.pad(ids, (0, max(0, self.whole - ids.shape[1])))[
                :, : self.whole
            ]
        x = {IDS: ids[:, :longest]}
        if self.masked:
            place = torch.arange(longest, device=ids.device)
            x[MASK] = (place < lengths.unsqueeze(1)).long()
        return x


def _at(p: Predictive, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [N, C], entropy and mutual information [N] at one position of each row."""
    if not p.likelihood.class_axis:
        raise Unavailable(f"generation needs a categorical likelihood, not {p.likelihood.name}")
    if p.has_samples:
        rows = torch.arange(p.samples.shape[1], device=p.samples.device)
        if p.samples.ndim != 4:
            raise Unavailable("generation needs logits of each token, [N, T, C]")
        f = p.samples[:, rows, :, place.to(rows.device)].movedim(0, 1)  # [S, N, C]
        own = Predictive.from_samples(f, p.likelihood.plain(), weights=p.weights)
        return own.probs, own.entropy, own.mutual_information
    table = p.probs
    if table.ndim != 3:
        raise Unavailable("generation needs logits of each token, [N, T, C]")
    rows = torch.arange(len(table), device=table.device)
    place = place.to(table.device)
    known = p.mutual_information if p.splits else p.entropy * math.nan
    return table[rows, :, place], p.entropy[rows, place], known[rows, place]


def _draw(probs: Tensor, temperature: float, k: int | None, source: torch.Generator) -> Tensor:
    """Draw one token per row, [N]. At temperature 0 it is the most probable one; if several are
    equally probable, the first of them."""
    uniform = torch.rand(len(probs), generator=source, dtype=torch.float64).to(probs.device)
    if temperature == 0:
        return probs.argmax(1)
    logits = probs.double().log() / temperature
    if k is not None and k < probs.shape[1]:
        least = logits.topk(k, 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    total = logits.softmax(1).cumsum(1)
    drawn = (total < (uniform * total[:, -1]).unsqueeze(1)).sum(1)
    return drawn.clamp(max=probs.shape[1] - 1)
