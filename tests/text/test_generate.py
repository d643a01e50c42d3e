"""Generation by the mixture of all draws, against the mixture computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language import WORDS, Markov, Tagger, Writer, sentences
from torch import Tensor

import doxa
from doxa.errors import MethodError, ShapeError, Unavailable
from doxa.text import generate, next_token

X, Y = next_token(sentences())
LIKELIHOOD = doxa.Categorical(ignore_index=-100)


def fitted(net: Any = None, method: Any = "deep-ensemble", x: Any = X, **options: Any) -> Any:
    options = {"steps": 30, "lr": 0.05, "members": 3, **options}
    return doxa.fit(
        Markov() if net is None else net, (x, Y), method, likelihood=LIKELIHOOD, validation=None,
        progress=False, **options,
    )  # fmt: skip


def mixture(posterior: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The table of probabilities after each token, its entropy, and the mutual information."""
    each = posterior.draw()["table.weight"].softmax(2)  # [S, V, V]
    probs = each.mean(0)
    entropy = torch.special.entr(probs).sum(1)
    return probs, entropy, entropy - torch.special.entr(each).sum(2).mean(0)


def test_each_token_has_the_probabilities_of_the_mixture() -> None:
    """5000 rows of one token: the next one has the mixture's probabilities, by a χ² test at the
    level 0.001, with a fixed seed."""
    posterior = fitted()
    table = mixture(posterior)[0][2]
    found = generate(posterior, {"input_ids": torch.full((5000, 1), 2)}, 1, seed=3)
    counts = torch.bincount(found.tokens[:, 1], minlength=WORDS).double()
    chi2 = float(((counts - 5000 * table) ** 2 / (5000 * table)).sum())
    assert chi2 < 22.5  # the 0.999 quantile with 6 degrees of freedom


def test_scores_are_those_of_the_mixture_before_each_token() -> None:
    posterior = fitted()
    probs, entropy, information = mixture(posterior)
    found = generate(posterior, X, 4, seed=1)
    lengths = X["attention_mask"].sum(1)
    assert torch.equal(found.prompt_lengths, lengths)
    assert torch.equal(found.lengths, lengths + 4)
    for row, length in enumerate(lengths.tolist()):
        tokens = found.tokens[row]
        assert torch.equal(tokens[:length], X["input_ids"][row, :length])
        assert bool((tokens[length + 4 :] == 0).all())
        before, after = tokens[length - 1 : length + 3], tokens[length : length + 4]
        torch.testing.assert_close(found.log_prob[row], probs[before, after].log())
        torch.testing.assert_close(found.entropy[row], entropy[before])
        torch.testing.assert_close(
            found.mutual_information[row], information[before], atol=1e-6, rtol=1e-4
        )


def test_temperature_zero_takes_the_most_probable_token() -> None:
    posterior = fitted()
    best = mixture(posterior)[0].argmax(1)
    found = generate(posterior, X, 3, temperature=0)
    for row, length in enumerate(found.prompt_lengths.tolist()):
        tokens = found.tokens[row, length - 1 : length + 3]
        assert torch.equal(tokens[1:], best[tokens[:-1]])


def test_top_k_draws_only_the_most_probable() -> None:
    posterior = fitted()
    likely = mixture(posterior)[0].topk(2, 1).indices
    found = generate(posterior, {"input_ids": torch.full((200, 1), 2)}, 1, top_k=2)
    assert set(found.tokens[:, 1].tolist()) == set(likely[2].tolist())


def test_a_row_ends_at_the_end_token_and_the_others_go_on() -> None:
    posterior = fitted()
    prompt = {"input_ids": torch.arange(1, WORDS).unsqueeze(1).repeat(5, 1)}
    free = generate(posterior, prompt, 6, seed=2)
    found = generate(posterior, prompt, 6, end=3, pad_token=6, seed=2)
    ended = 0
    for row in range(len(free.tokens)):
        whole = free.tokens[row, 1:].tolist()
        stop = whole.index(3) + 1 if 3 in whole else 6
        ended += stop < 6
        tokens = found.tokens[row].tolist()
        assert tokens[1 : stop + 1] == whole[:stop]
        assert all(t == 6 for t in tokens[stop + 1 :])
        assert int(found.lengths[row]) == 1 + stop
        assert found.entropy[row].isnan().tolist() == [i >= stop for i in range(6)]
    assert 0 < ended < len(free.tokens)


def test_padding_of_prompts_on_either_side_changes_nothing() -> None:
    posterior = fitted(Writer())
    right = {"input_ids": torch.tensor([[4, 2, 0], [1, 5, 3]])}
    right["attention_mask"] = torch.tensor([[1, 1, 0], [1, 1, 1]])
    left = {"input_ids": torch.tensor([[0, 4, 2], [1, 5, 3]])}
    left["attention_mask"] = torch.tensor([[0, 1, 1], [1, 1, 1]])
    one, two = (generate(posterior, p, 5, seed=4) for p in (right, left))
    alone = generate(posterior, {"input_ids": torch.tensor([[4, 2]])}, 5, temperature=0)
    both = generate(posterior, right, 5, temperature=0)
    assert torch.equal(one.tokens, two.tokens)
    assert both.tokens[0, :7].tolist() == alone.tokens[0].tolist()
    torch.testing.assert_close(both.entropy[0], alone.entropy[0])


def test_the_same_seed_gives_the_same_tokens() -> None:
    posterior = fitted(Writer(), doxa.MeanField(), members=1)
    first, again, other = (generate(posterior, X, 6, n=5, seed=s).tokens for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_network_without_names_keeps_its_length() -> None:
    class Bare(Markov):
        def forward(self, ids: Tensor) -> Any:  # type: ignore[override]
            return super().forward(ids)

    posterior = fitted(Bare(), x=X["input_ids"])
    probs = mixture(posterior)[0]
    found = generate(posterior, torch.tensor([[4, 2]]), 4, temperature=0)
    tokens = found.tokens[0, 1:]
    assert torch.equal(tokens[1:], probs.argmax(1)[tokens[:-1]])
    with pytest.raises(ShapeError, match="6 tokens"):
        generate(posterior, torch.tensor([[4, 2]]), 6)


def test_a_recalibrated_posterior_generates() -> None:
    """Where there are no draws, its table of probabilities is used."""
    from doxa.evaluate import recalibrate

    posterior = recalibrate(fitted(), next_token(sentences(seed=5)), "temperature")
    words = torch.arange(WORDS).unsqueeze(1)
    x = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    p = posterior.predict(x).probs[:, :, 0]
    found = generate(posterior, {"input_ids": torch.tensor([[4], [2]])}, 1, seed=1)
    before, after = found.tokens.unbind(1)
    torch.testing.assert_close(found.log_prob[:, 0], p[before, after].log())


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        (torch.ones(2), {}, ShapeError, r"tokens \[N, T\]"),
        (torch.ones(2, 2), {}, ShapeError, "whole numbers"),
        ({"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.zeros(1, 2)}, {},
         ShapeError, "row 0 has no token"),
        ({"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.ones(1, 3)}, {},
         ShapeError, "mask"),
        ({"input_ids": torch.ones(1, 2).long()}, {"temperature": -1}, MethodError, "temperature"),
        ({"input_ids": torch.ones(1, 2).long()}, {"top_k": 0}, MethodError, "top_k"),
    ],
)  # fmt: skip
def test_mistakes(prompt: Any, options: Any, error: Any, message: str) -> None:
    posterior = fitted(steps=1)
    with pytest.raises(error, match=message):
        generate(posterior, prompt, 2, **options)


def test_networks_that_write_nothing() -> None:
    x, classes = X, torch.arange(16) % 3
    one = doxa.fit(Tagger(tokens=False), (x, classes), "map", likelihood="categorical", steps=1)
    with pytest.raises(Unavailable, match="logits of each token"):
        generate(one, X, 1)
