"""A causal language model with adapters: ensembles, Laplace, SWAG and IVON on LoRA weights.

    python examples/language_model.py [--steps 150]     needs transformers and peft: doxa[hf]

A small GPT-2 with random weights learns the characters of English prose: the help pages that come
with Python. It is frozen, and LoRA adapters on its attention learn Python source code from 48 lines
of 24 characters. The script prints scores of new source code, and how well the uncertainty of each
token tells it from text of other kinds; then it continues a line by the mixture of five adapters.
It takes less than a minute on one thread.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Iterable
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

import doxa
from doxa import text
from doxa.evaluate import auroc, ece

LETTERS = "\n abcdefghijklmnopqrstuvwxyz.,:;()[]'\"_=+-*/#0"  # others are the last one
LENGTH, WIDTH = 24, 32
IDS = {letter: i for i, letter in enumerate(LETTERS)}


def encode(passage: str) -> Tensor:
    return torch.tensor([IDS.get(letter, len(LETTERS) - 1) for letter in passage.lower()])


def decode(ids: Iterable[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def passages(whole: str, n: int, seed: int) -> Tensor:
    """n passages of LENGTH characters, [n, LENGTH], that do not overlap."""
    ids = encode(" ".join(whole.split(" ")))
    table = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    return table[order[:n]]


def source(*names: str) -> str:
    return "\n".join(inspect.getsource(__import__(name, fromlist=["x"])) for name in names)


def rows(ids: Tensor) -> tuple[Any, Tensor]:
    """x and y: at each position, the next character."""
    return text.next_token({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def new_network() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(LETTERS), n_positions=2 * LENGTH, n_embd=WIDTH, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def main() -> None:
    from peft import LoraConfig, get_peft_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps of the adapters")
    parser.add_argument("--only", help="one method")
    asked = parser.parse_args()
    steps = asked.steps
    torch.manual_seed(0)
    began = time.perf_counter()
    likelihood = doxa.Categorical(ignore_index=-100, classes_last=True)

    prose = "\n".join(topics.topics.values())
    base = new_network()
    trained = doxa.fit(
        base, rows(passages(prose[:200_000], 2000, 0)), "map", likelihood=likelihood, init="given",
        steps=2 * steps, lr=3e-3, validation=None, progress=False,
    )  # fmt: skip
    base.load_state_dict({k: v[0] for k, v in trained.draw(1).items()}, strict=False)
    print(f"{sum(p.numel() for p in base.parameters())} weights, {len(LETTERS)} characters")

    net = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    train = passages(source("json.decoder", "argparse"), 48, 1)
    code = passages(source("textwrap", "json.encoder", "csv"), 50, 2)
    noise = torch.randint(0, len(LETTERS), code.shape, generator=torch.Generator().manual_seed(3))
    others = {"prose": passages(prose[200_000:], 50, 4), "reversed": code.flip(1), "noise": noise}

    # A row has LENGTH × 46 outputs. Their Jacobian, which "ggn" and "linearised" need, costs a
    # backward pass each; sampled curvature costs ten per batch, and drawn weights none.
    laplace = doxa.Laplace(
        "kronecker", curvature="sampled", predictive="sampled", link="samples", newton_steps=0,
        mean_correction=False,
    )  # fmt: skip
    methods: dict[str, tuple[Any, dict[str, Any]]] = {
        "map": ("map", {}),
        "deep-ensemble": (doxa.DeepEnsemble(), {"members": 5}),
        "laplace": (laplace, {}),
        "swag": (doxa.SWAG(rank=10, cycle=3, average=0.4), {}),
        "ivon": ("ivon", {}),
    }
    print("method            nll    ece     MI | AUROC of MI and of entropy: " + ", ".join(others))
    for name, (method, options) in methods.items():
        if asked.only not in (None, name):
            continue
        start = time.perf_counter()
        posterior = doxa.fit(
            net, rows(train), method, likelihood=likelihood, steps=steps, validation=None,
            prior=doxa.Normal(0.3), progress=False, **options,
        )  # fmt: skip
        n = None if name in ("map", "deep-ensemble") else 20  # draws of the weights
        inside, error = scores(posterior, code, n)
        line = f"{name:14} {inside.nll:6.3f} {error:6.3f} "
        line += f"{float(inside.mutual_information.nanmean()):6.3f} |"
        for given in others.values():
            outside, _ = scores(posterior, given, n)
            pairs = (
                (inside.mutual_information, outside.mutual_information),
                (inside.entropy, outside.entropy),
            )
            each = [auroc(a.nanmean(1), b.nanmean(1)) for a, b in pairs]
            line += f" {each[0]:.2f} {each[1]:.2f},"
        print(f"{line[:-1]}   ({time.perf_counter() - start:.1f} s)")
        if name == "deep-ensemble":
            write(posterior)
    print(f"{time.perf_counter() - began:.0f} s")


def write(ensemble: Any) -> None:
    """Continue a line of source code."""
    prompt = {"input_ids": encode("    def __init__(").unsqueeze(0)}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    found = text.generate(ensemble, prompt, 30, temperature=0.7, seed=1)
    print(repr(decode(found.tokens[0].tolist())))
    print("disagreement of the adapters per token:", found.mutual_information[0].mean().item())


def scores(posterior: Any, ids: Tensor, n: int | None) -> tuple[text.TokenScores, float]:
    """The scores of each token, and the calibration error."""
    x, y = rows(ids)
    p = posterior.predict(x, n=n)
    return text.per_token(p, y), ece(p, y)


if __name__ == "__main__":
    main()
