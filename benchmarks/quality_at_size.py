"""What each method adds to a network that is trained already: a ResNet-20 and a small GPT-2.

    python -m benchmarks.quality_at_size images     # needs DOXA_DATA: CIFAR-10 subset, CamVid
    python -m benchmarks.quality_at_size tokens     # needs transformers and peft: doxa[hf]
        [--methods A,B] [--seeds 1] [--out benchmarks/results/quality_at_size.json] [--show]

**images.** A ResNet-20 (272,000 weights) is trained by MAP on the first images of the CIFAR-10
subset. Every row starts from its weights. Methods that train go on for a third of its epochs, at a
fifth of its rate, MAP too; Laplace only takes the curvature; heads are five new last layers on the
frozen trunk. Test rows: NLL, calibration error, error; patches of CamVid are out of distribution.

**tokens.** A GPT-2 of 4 layers and 128 dimensions learns the characters of English prose, the help
pages of Python. It is frozen, and LoRA adapters of rank 8 learn Python source code from 200 lines
of 64 characters. Test lines: NLL per character and calibration error; prose, reversed lines and
random characters are out of distribution. "heads" are five new output layers on the frozen trunk.

One seed is one trained network. Settings were fixed beforehand, the same for all methods of a
table; no test row chose any. The cells are kept in --out, and what is known is not computed again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn

import doxa
from benchmarks.image_data import Images, load_images
from doxa import text
from doxa.evaluate import auroc, ece

RESULTS = Path(__file__).parent / "results" / "quality_at_size.json"
ROWS, TEST, OUTSIDE, EPOCHS, RATE, BATCH = 4000, 1000, 500, 12, 2e-3, 64
SAMPLES = 20  # of the methods that draw weights; the others predict with their members
DRAWN = {"laplace-last-layer", "laplace-kronecker", "swag", "ivon", "lora-laplace", "lora-swag",
         "lora-ivon"}  # fmt: skip
Cell = dict[str, Any]
Fit = Callable[..., doxa.Posterior]


def epochs_of_swag(steps: int) -> doxa.SWAG:
    """A point at the end of each epoch, from the first on."""
    return doxa.SWAG(average=1.0, cycle=steps, rank=3, samples=SAMPLES)


# Images ---------------------------------------------------------------------------------------

IMAGE_METHODS = ("map", "map-longer", "laplace-last-layer", "laplace-kronecker", "heads", "swag",
                 "ivon")  # fmt: skip


def trained_resnet(data: Images, seed: int) -> nn.Module:
    """The network with the weights of a MAP fit."""
    torch.manual_seed(seed)
    net = doxa.nets.resnet20()
    fitted = doxa.fit(
        net, (data.x, data.y), "map", likelihood="categorical", prior=doxa.Normal(1.0), seed=seed,
        epochs=EPOCHS, lr=RATE, batch_size=BATCH, validation=None, progress=False,
    )  # fmt: skip
    net.load_state_dict({k: v[0] for k, v in fitted.draw(1).items()}, strict=False)
    return net


def image_fit(method: str, net: nn.Module, data: Images, seed: int) -> doxa.Posterior:
    steps = -(-len(data.x) // BATCH)
    more: dict[str, Any] = {"epochs": EPOCHS / 3, "lr": RATE / 5}
    chosen: dict[str, tuple[Any, dict[str, Any]]] = {
        "map": ("map", {"steps": 1, "lr": 1e-12}),
        "map-longer": ("map", more),
        "laplace-last-layer": (
            doxa.Laplace("full", train=False, mean_correction=False), {"subset": "last_layer"}
        ),
        "laplace-kronecker": (doxa.Laplace("kronecker", train=False, mean_correction=False), {}),
        "heads": (
            doxa.DeepEnsemble(features="frozen"),
            {"members": 5, "epochs": EPOCHS, "lr": RATE, "init": "given"},
        ),
        "swag": (epochs_of_swag(steps), more),
        "ivon": (doxa.IVON(), {"epochs": EPOCHS / 3, "lr": 0.1}),
    }  # fmt: skip
    chosen_method, options = chosen[method]
    subset = options.pop("subset", "all")
    model = doxa.Model(net, "categorical", doxa.Normal(1.0), subset)
    return doxa.fit(
        model, (data.x, data.y), chosen_method, seed=seed, batch_size=BATCH, validation=None,
        progress=False, **{"init": "given"} | options,
    )  # fmt: skip


def images(methods: list[str], seed: int, keep: Callable[[str, Cell], None]) -> None:
    data = load_images(os.environ["DOXA_DATA"], "cifar10", ROWS, TEST)
    net: nn.Module | None = None
    for method in methods:
        net = trained_resnet(data, seed) if net is None else net
        start = time.process_time()
        posterior = image_fit(method, net, data, seed)
        fitted = time.process_time() - start
        n = SAMPLES if method in DRAWN else None
        p = posterior.predict(data.x_test, n)
        q = posterior.predict(data.outside["camvid"][:OUTSIDE], n)
        right = p.probs.argmax(1) == data.y_test
        cell = {
            "nll": -float(p.log_prob(data.y_test).mean()), "ece": float(ece(p, data.y_test)),
            "error": 1 - float(right.double().mean()), "ood": outside_scores(p, q),
            "fit_seconds": fitted, "predict_seconds": time.process_time() - start - fitted,
            "status": str(posterior.status), "reason": posterior.status.reason,
        }  # fmt: skip
        keep(method, cell)


def outside_scores(p: Any, q: Any) -> dict[str, float | None]:
    found: dict[str, float | None] = {"entropy": auroc(p.entropy, q.entropy)}
    several = p.splits and len(p.weights) != 1
    found["mutual information"] = (
        auroc(p.mutual_information, q.mutual_information) if several else None
    )
    return found


# Tokens ---------------------------------------------------------------------------------------

TOKEN_METHODS = ("base", "map", "lora-ensemble", "lora-laplace", "lora-swag", "lora-ivon", "heads",
                 "laplace-last-layer")  # fmt: skip
LETTERS = "\n abcdefghijklmnopqrstuvwxyz.,:;()[]'\"_=+-*/#0"  # others are the last one
IDS = {letter: i for i, letter in enumerate(LETTERS)}
LENGTH, STEPS, ADAPTER_STEPS = 64, 700, 200
LIKELIHOOD = doxa.Categorical(ignore_index=-100, classes_last=True)


def passages(whole: str, n: int, seed: int) -> Tensor:
    """n passages of LENGTH characters, [n, LENGTH], that do not overlap."""
    ids = torch.tensor([IDS.get(letter, len(LETTERS) - 1) for letter in whole.lower()])
    table = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    return table[order[:n]]


def source(*names: str) -> str:
    return "\n".join(inspect.getsource(__import__(name, fromlist=["x"])) for name in names)


def labelled(ids: Tensor) -> tuple[Any, Tensor]:
    """x and y: at each position, the next character."""
    return text.next_token({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def trained_transformer(prose: str, seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(LETTERS), n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    fitted = doxa.fit(
        net, labelled(passages(prose, 4000, seed)), "map", likelihood=LIKELIHOOD, init="given",
        steps=STEPS, lr=2e-3, batch_size=32, validation=None, progress=False, seed=seed,
    )  # fmt: skip
    net.load_state_dict({k: v[0] for k, v in fitted.draw(1).items()}, strict=False)
    return net


def token_fit(method: str, base: Any, train: Tensor, seed: int) -> doxa.Posterior:
    from copy import deepcopy

    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    options: dict[str, Any] = {"steps": ADAPTER_STEPS, "lr": 3e-3, "batch_size": 32}
    net = deepcopy(base)
    if method in ("base", "heads", "laplace-last-layer"):
        for name, tensor in net.named_parameters():
            tensor.requires_grad_(name.startswith("lm_head"))
    else:
        net = get_peft_model(net, adapters)
    sampled = {"curvature": "sampled", "predictive": "sampled", "link": "samples",
               "newton_steps": 0, "mean_correction": False}  # fmt: skip
    chosen: dict[str, tuple[Any, dict[str, Any]]] = {
        "base": ("map", {"steps": 1, "lr": 1e-12}),
        "map": ("map", {}),
        "lora-ensemble": (doxa.DeepEnsemble(), {"members": 5}),
        "lora-laplace": (doxa.Laplace("kronecker", **sampled), {}),
        "lora-swag": (doxa.SWAG(rank=10, cycle=5, average=0.4, samples=SAMPLES), {}),
        "lora-ivon": (doxa.IVON(), {"lr": 0.03}),  # at .1 its loss rises
        "heads": (doxa.DeepEnsemble(), {"members": 5, "init": "fresh"}),
        "laplace-last-layer": (doxa.Laplace("kronecker", **sampled), {"init": "given"}),
    }
    chosen_method, more = chosen[method]
    if method == "base":
        more["init"] = "given"
    return doxa.fit(
        net, labelled(train), chosen_method, likelihood=LIKELIHOOD, prior=doxa.Normal(0.3),
        validation=None, progress=False, seed=seed, **options | more,
    )  # fmt: skip


def tokens(methods: list[str], seed: int, keep: Callable[[str, Cell], None]) -> None:
    prose = "\n".join(topics.topics.values())
    cut = len(prose) * 4 // 5
    train = passages(source("json.decoder", "argparse", "ast"), 200, seed + 1)
    code = passages(source("textwrap", "json.encoder", "csv", "shlex"), 200, seed + 2)
    noise = torch.randint(
        0, len(LETTERS), code.shape, generator=torch.Generator().manual_seed(seed + 3)
    )
    others = {"prose": passages(prose[cut:], 200, seed), "reversed": code.flip(1), "noise": noise}
    base: Any = None
    for method in methods:
        base = trained_transformer(prose[:cut], seed) if base is None else base
        start = time.process_time()
        posterior = token_fit(method, base, train, seed)
        fitted = time.process_time() - start
        n = SAMPLES if method in DRAWN else None
        inside, error = token_scores(posterior, code, n)
        found: dict[str, Any] = {}
        for name, ids in others.items():
            outside, _ = token_scores(posterior, ids, n)
            information = (inside.mutual_information, outside.mutual_information)
            found[name] = {
                "entropy": auroc(inside.entropy.nanmean(1), outside.entropy.nanmean(1)),
                "mutual information": None
                if float(information[0].nan_to_num().abs().max()) < 1e-6
                else auroc(*(each.nanmean(1) for each in information)),
            }
        keep(method, {
            "nll": inside.nll, "ece": error, "ood": found, "fit_seconds": fitted,
            "predict_seconds": time.process_time() - start - fitted,
            "status": str(posterior.status), "reason": posterior.status.reason,
        })  # fmt: skip


def token_scores(
    posterior: doxa.Posterior, ids: Tensor, n: int | None
) -> tuple[text.TokenScores, float]:
    x, y = labelled(ids)
    p = posterior.predict(x, n)
    return text.per_token(p, y), float(ece(p, y))


# The table ------------------------------------------------------------------------------------

TABLES = {"images": (images, IMAGE_METHODS), "tokens": (tokens, TOKEN_METHODS)}


def show(cells: dict[str, Cell], table: str) -> None:
    print(f"{table:20} seeds      nll     ece   error | AUROC of entropy, of mutual information")
    for method in TABLES[table][1]:
        of = [cell for key, cell in cells.items() if key.split("/")[:2] == [table, method]]
        if not of:
            continue
        line = f"{method:20} {len(of):5} {mean(of, 'nll'):8.3f} {mean(of, 'ece'):7.3f} "
        line += f"{mean(of, 'error'):7.3f} |" if table == "images" else "        |"
        first = of[0]["ood"]
        for name in [""] if table == "images" else list(first):
            rows = [cell["ood"][name] if name else cell["ood"] for cell in of]
            values = [mean(rows, score) for score in rows[0]]
            line += f" {name} " + " ".join("–" if math.isnan(v) else f"{v:.3f}" for v in values)
        print(f"{line}   {mean(of, 'fit_seconds'):.0f} s; {of[0]['status']}")


def mean(rows: list[Any], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--methods", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true", help="only show what is known")
    asked = parser.parse_args()
    run, methods = TABLES[asked.table]
    cells: dict[str, Cell] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    wanted = methods if asked.methods is None else asked.methods.split(",")
    for seed in range(0 if asked.show else asked.seeds):
        missing = [m for m in wanted if f"{asked.table}/{m}/{seed}" not in cells]

        def keep(method: str, cell: Cell, seed: int = seed) -> None:
            cells[f"{asked.table}/{method}/{seed}"] = cell
            asked.out.write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n")
            show(cells, asked.table)

        if missing:
            run(missing, seed, keep)
    show(cells, asked.table)


if __name__ == "__main__":
    main()
