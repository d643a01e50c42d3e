"""Models of transformers with small random configurations, adapters of PEFT, and the package
datasets; each is skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from examples import load
from torch import Tensor, nn

import doxa
from doxa.text import generate, next_token, pad

transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install doxa[hf]"
)

WORDS, LENGTH, ROWS = 13, 7, 12
LIKELIHOOD = doxa.Categorical(ignore_index=-100)
BERT = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "max_position_embeddings": 16, "num_labels": 3,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT2 = {
    "vocab_size": WORDS, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 8, "max_position_embeddings": 16,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def make(name: str) -> Any:
    t = transformers
    torch.manual_seed(0)
    kinds = {
        "sequences": lambda: t.BertForSequenceClassification(t.BertConfig(**BERT)),
        "tokens": lambda: t.BertForTokenClassification(t.BertConfig(**BERT)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
    }  # fmt: skip
    return kinds[name]()


def inputs(side: str = "right") -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=g)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    mask = mask if side == "right" else mask.flip(1)
    return {"input_ids": ids * mask, "attention_mask": mask}


X = inputs()
SEEN = X["attention_mask"] > 0
TARGETS = {
    "sequences": torch.arange(ROWS) % 3,
    "tokens": torch.where(SEEN, X["input_ids"] % 3, -100),
    "gpt2": next_token(X)[1],
    "llama": next_token(X)[1],
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_outputs_are_those_of_the_untouched_network(name: str) -> None:
    """At all positions that are no padding, with and without a mask; all members at once, and one
    row at a time under vmap."""
    net = make(name).eval()
    for x in (X, {"input_ids": X["input_ids"].clamp_min(1)}):
        model = doxa.Model(net, "categorical").build(x)
        with torch.no_grad():
            ours, theirs = model.forward({}, x), net(**x).logits
        seen = SEEN if "attention_mask" in x else torch.ones_like(SEEN)
        chosen = (lambda f, seen=seen: f) if ours.ndim == 2 else (lambda f, seen=seen: f[seen])
        torch.testing.assert_close(chosen(ours), chosen(theirs), atol=1e-5, rtol=1e-4)
        each = torch.func.vmap(
            lambda row, model=model: model.forward({}, {k: v[None] for k, v in row.items()})[0]
        )(x)
        torch.testing.assert_close(chosen(each), chosen(theirs), atol=1e-5, rtol=1e-4)
    assert net.config._attn_implementation == "sdpa"  # the user's network is as it was


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_log_likelihood_is_the_loss_of_transformers(name: str) -> None:
    """Its loss moves labels inside the network, and is a mean over tokens."""
    net = make(name).eval()
    labels = torch.where(SEEN, X["input_ids"], -100)
    loss = net(**X, labels=labels).loss
    x, y = next_token({**X, "labels": labels})
    model = doxa.Model(net, doxa.Categorical(ignore_index=-100, classes_last=True)).build(x)
    total = model.log_likelihood({}, x, y).sum()
    torch.testing.assert_close(-total / (y != -100).sum(), loss)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_blocks_are_computed_again(name: str) -> None:
    """With dropout that attention draws itself, and without a cache, to which a second call would
    add keys again. Checkpointing by transformers, which is on in training alone, becomes that."""
    net = make(name).double()
    for module in net.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.2
    net.config.attention_dropout = net.config.attn_pdrop = 0.2
    x, y = next_token(X)
    options = {"init": "given", "steps": 4, "validation": None, "progress": False, "engine": "loop"}
    fit = lambda **more: doxa.fit(net, (x, y), "map", likelihood=LIKELIHOOD, **options, **more)  # noqa: E731
    plain = fit().point()
    again = fit(recompute="blocks")
    assert again.model is not None and again.model.recomputed
    assert float((plain - again.point()).abs().max()) < 1e-12
    assert net.config.use_cache  # the user's network is as it was
    net.gradient_checkpointing_enable()
    own = fit()
    assert own.model is not None and own.model.recomputed == again.model.recomputed
    assert float((plain - own.point()).abs().max()) < 1e-12


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "map": ("map", {"steps": 2}),
    "deep-ensemble": ("deep-ensemble", {"steps": 2, "members": 2}),
    "swag": (doxa.SWAG(rank=2, cycle=1, average=0.5), {"steps": 8}),
    "ivon": ("ivon", {"steps": 2}),
    "mc-dropout": ("mc-dropout", {"steps": 2}),
    "sgld": (doxa.SGLD(2, 2, 1), {"members": 2}),
    "laplace": (doxa.Laplace("diagonal", curvature="fisher", predictive="sampled"), {"steps": 2}),
}
CASES = [
    pytest.param(net, method, marks=() if (net, method) in {
        ("sequences", "map"), ("tokens", "deep-ensemble"), ("gpt2", "swag"), ("gpt2", "ivon"),
        ("llama", "sgld"), ("llama", "laplace"), ("gpt2", "mc-dropout"),
    } else pytest.mark.slow)
    for net in TARGETS for method in METHODS
]  # fmt: skip


@pytest.mark.parametrize(("name", "method"), CASES)
def test_every_family_fits_every_kind(name: str, method: str) -> None:
    net, y = make(name), TARGETS[name]
    kind, options = METHODS[method]
    posterior = doxa.fit(
        net, {**X, "labels": y}, kind, likelihood=LIKELIHOOD, init="given", validation=None,
        progress=False, **options,
    )  # fmt: skip
    p = posterior.predict(X, n=None if method in ("map", "deep-ensemble", "sgld") else 3)
    classes = 3 if name in ("sequences", "tokens") else WORDS
    assert p.probs.shape == (ROWS, classes, *y.shape[1:])
    assert p.entropy.shape == p.mutual_information.shape == y.shape
    assert bool(torch.isfinite(p.probs).all())
    if options.get("members"):
        assert posterior.diagnostics["engine"] == "stack"


def test_a_fit_of_a_network_with_dropout_repeats() -> None:
    """Attention draws its own dropout: members then run one at a time, and the seed decides."""
    config = transformers.GPT2Config(**{**GPT2, "attn_pdrop": 0.1, "resid_pdrop": 0.1})
    net = transformers.GPT2LMHeadModel(config)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        posterior = doxa.fit(
            net, (X, TARGETS["gpt2"]), "deep-ensemble", members=2, steps=3, init="given",
            likelihood=LIKELIHOOD, validation=None, progress=False,
        )  # fmt: skip
        assert posterior.diagnostics["engine"] == "loop"
        found.append(posterior.predict(X).probs)
    assert torch.equal(*found)


@pytest.mark.parametrize("side", ["right", "left"])
def test_greedy_generation_is_that_of_transformers(side: str) -> None:
    """With one member; transformers has a cache of keys and values, and pads on the left."""
    net = make("llama").eval()
    posterior = doxa.fit(
        net, (X, TARGETS["llama"]), "map", likelihood=LIKELIHOOD, init="given", steps=1, lr=1e-12,
        validation=None, progress=False,
    )  # fmt: skip
    left = inputs("left")
    expected = net.generate(**left, max_new_tokens=5, do_sample=False)[:, LENGTH:]
    prompt = left
    if side == "right":
        rows = [ids[mask > 0].tolist() for ids, mask in zip(*left.values(), strict=True)]
        prompt = pad([{"input_ids": row} for row in rows])
    found = generate(posterior, prompt, 5, temperature=0)
    for row, start in enumerate(found.prompt_lengths.tolist()):
        assert found.tokens[row, start : start + 5].tolist() == expected[row].tolist()


def test_a_tied_last_layer_is_named() -> None:
    with pytest.raises(doxa.errors.ModelError, match=r"tied.*subset='transformer\.wte\.weight'"):
        doxa.fit(
            make("gpt2"), (X, TARGETS["gpt2"]), "laplace", subset="last_layer", steps=1,
            likelihood=LIKELIHOOD, progress=False,
        )  # fmt: skip


def test_tied_embeddings_are_one_weight() -> None:
    model = doxa.Model(make("gpt2"), "categorical").build(X)
    assert "lm_head.weight" not in model.layout.names
    weights = model.layout.unflatten(model.given())
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"] * 2
    changed = make("gpt2")
    with torch.no_grad():
        changed.transformer.wte.weight.mul_(2)
    theirs = changed.eval()(**X).logits
    torch.testing.assert_close(model.forward(weights, X)[SEEN], theirs[SEEN], atol=1e-5, rtol=1e-4)


def test_a_dataset_of_the_package_datasets() -> None:
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed: pip install doxa[hf]"
    )
    rows = [
        {"input_ids": ids[mask > 0].tolist(), "label": i % 3, "text": "words"}
        for i, (ids, mask) in enumerate(zip(*X.values(), strict=True))
    ]
    table = datasets.Dataset.from_list(rows)
    net, options = make("sequences"), {"init": "given", "steps": 2, "validation": None}
    found, plain = (
        doxa.fit(net, data, "map", likelihood="categorical", progress=False, **options)
        for data in (table, (X, TARGETS["sequences"]))
    )
    torch.testing.assert_close(found.predict(table).probs, plain.predict(X).probs)
    encoding = transformers.BatchEncoding(X)
    assert torch.equal(plain.predict(encoding).probs, plain.predict(X).probs)


def adapted(name: str = "llama") -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install doxa[hf]")
    own = {"target_modules": ["q_proj", "v_proj"]}
    if name == "gpt2":
        own = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    torch.manual_seed(0)
    net: nn.Module = peft.get_peft_model(make(name), peft.LoraConfig(r=2, **own))
    return net


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_ensemble_of_adapters(name: str, tmp_path: Path) -> None:
    """Only adapters are weights, all members run at once and start as the given network, and the
    artefact holds no other weight."""
    posterior = doxa.fit(
        adapted(name), (X, TARGETS[name]), "deep-ensemble", members=3, steps=5, lr=0.05,
        likelihood=LIKELIHOOD, validation=None, progress=False,
    )  # fmt: skip
    assert posterior.diagnostics["engine"] == "stack"
    assert all("lora_" in weight for weight in posterior.layout.names)
    assert posterior.predict(X).mutual_information[SEEN].min() > 0
    posterior.save(tmp_path / "run", frozen=False)
    loaded = doxa.load(tmp_path / "run", net=adapted(name))
    assert torch.equal(loaded.predict(X).probs, posterior.predict(X).probs)
    with pytest.raises(doxa.errors.ModelError, match="frozen parameters"):
        other = adapted(name)
        for p in other.parameters():
            p.data.add_(0.1)
        doxa.load(tmp_path / "run", net=other)


@pytest.mark.slow
def test_the_example(monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install doxa[hf]")
    monkeypatch.setattr("sys.argv", ["language_model", "--steps", "5", "--only", "deep-ensemble"])
    load("language_model").main()
    shown = capsys.readouterr().out
    assert "28480 weights" in shown and "disagreement of the adapters" in shown
