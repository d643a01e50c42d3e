"""Laplace for many outputs: classes, pixels, a vocabulary, and networks that vmap refuses.

    python -m benchmarks.laplace_large [--rows NAMES] [--before SRC] [--exact] [--peer PYTHON]
        [--device cuda]

Each row trains a network by a few steps of plain PyTorch and then fits `Laplace(train=False)` to
it, in a process of its own, on one thread. The time is that of `fit`, with everything that it does
after the curvature (prior scale, comparison with the maximum). On a CPU, processor seconds count,
which depend less than those of a clock on who else is on the machine. The networks are not at a
maximum, so that their evidence contains a large λ²/2, and says nothing about them.

`--before` names the `src` folder of another version of doxa, which runs the same rows. `--exact`
adds curvature="ggn" to rows that are sampled, where it is not out of reach; the difference of the
two evidences stands beside the error that the sampled one states. `--peer` names a Python in which
laplace-torch is installed; it fits the same networks, curvature and evidence at one prior scale.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(images: int, size: int) -> tuple[nn.Module, Any, Any]:
    """2,625 weights, one logit for each pixel."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 1, 3, padding=1),
    )  # fmt: skip
    x = normal(images, 1, size, size)
    return net, x, (x > 0.5).float()


class UNet(nn.Module):
    """Two levels down and up, with transposed convolutions and group norms."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU())

        w = width
        self.down = nn.ModuleList([block(3, w), block(w, 2 * w), block(2 * w, 4 * w)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)]
        )
        self.join = nn.ModuleList([block(4 * w, 2 * w), block(2 * w, w)])
        self.head = nn.Conv2d(w, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](nn.functional.max_pool2d(a, 2))
        c = self.down[2](nn.functional.max_pool2d(b, 2))
        b = self.join[0](torch.cat([self.up[0](c), b], 1))
        return self.head(self.join[1](torch.cat([self.up[1](b), a], 1)))


def unet(images: int, size: int) -> tuple[nn.Module, Any, Any]:
    x = normal(images, 3, size, size)
    return UNet(8, 3), x, x.argmax(1)


class Residual(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip
        self.skip = nn.Conv2d(a, b, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.path(x) + self.skip(x))


def resnet(images: int, classes: int) -> tuple[nn.Module, Any, Any]:
    """A residual network of 78,000 weights on images of 32²."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Residual(16, 16, 1),
        Residual(16, 32, 2), Residual(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, classes),
    )  # fmt: skip
    return net, normal(images, 3, 32, 32), torch.arange(images) % classes


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.ln1(x)).split(d, -1)
        q, k, v = (a.reshape(b, t, 4, d // 4).transpose(1, 2) for a in parts)
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class Transformer(nn.Module):
    """A causal transformer whose padding is tested by an `if`, which vmap refuses."""

    def __init__(self, classes: int, d: int = 64, layers: int = 4, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(200, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        length, pad = ids.shape[1], ids == 0
        x = self.tokens(ids) + self.places(torch.arange(length, device=ids.device)[None])
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
        if pad.any():
            mask = mask & ~pad[:, None, None]
        for block in self.blocks:
            x = block(x, mask)
        last = (~pad).sum(1) - 1
        return self.head(self.ln(x)[torch.arange(len(x), device=ids.device), last])


def transformer(rows: int, classes: int) -> tuple[nn.Module, Any, Any]:
    ids = torch.randint(1, 200, (rows, 32), generator=torch.Generator().manual_seed(0))
    ids[::3, 25:] = 0
    return Transformer(classes), ids, torch.arange(rows) * 7 % classes


def gpt2(rows: int, classes: int) -> tuple[nn.Module, Any, Any]:
    """GPT-2 small with random weights, as a classifier of 128 tokens."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = GPT2Config(num_labels=classes, pad_token_id=0, use_cache=False)
            self.net = GPT2ForSequenceClassification(config)

        def forward(self, ids: Tensor) -> Tensor:
            return self.net(ids).logits

    ids = torch.randint(1, 50257, (rows, 128), generator=torch.Generator().manual_seed(0))
    return Logits(), ids, torch.arange(rows) * 7 % classes


def resnet50(images: int, classes: int) -> tuple[nn.Module, Any, Any]:
    """torchvision's, on images of 224²."""
    from torchvision.models import resnet50 as make

    net = make(num_classes=classes)
    return net, normal(images, 3, 224, 224), torch.arange(images) % classes


@dataclass(frozen=True)
class Row:
    words: str
    make: Callable[[], tuple[nn.Module, Any, Any]]
    structure: str
    likelihood: str = "categorical"
    subset: Any = "all"
    exact: bool = True  # whether curvature="ggn" is within reach
    before: bool = True  # whether another version can run it
    steps: int = 30  # of training, before the fit
    batch: int | None = None  # of training; None: all rows
    gpu: bool = False  # whether it needs a GPU, and packages that a GPU machine has


def trained(net: nn.Module, x: Any, y: Any, row: Row) -> nn.Module:
    """Some steps of Adam with weight decay, on all rows or on batches."""
    adam = torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=1e-3)
    loss = nn.functional.cross_entropy
    if row.likelihood == "bernoulli":
        loss = nn.functional.binary_cross_entropy_with_logits
    size = row.batch or len(x)
    for t in range(row.steps):
        rows = slice(t * size % len(x), t * size % len(x) + size)
        adam.zero_grad()
        loss(net(x[rows]), y[rows]).backward()
        adam.step()
    return net.eval()


ROWS = {
    "dense-16-kronecker": Row("2,625 weights, 16 images of 32²", lambda: dense(16, 32),
                              "kronecker", "bernoulli"),
    "dense-16-diagonal": Row("2,625 weights, 16 images of 32²", lambda: dense(16, 32),
                             "diagonal", "bernoulli"),
    "dense-64-kronecker": Row("2,625 weights, 64 images of 32²", lambda: dense(64, 32),
                              "kronecker", "bernoulli", exact=False, before=False),
    "dense-64-diagonal": Row("2,625 weights, 64 images of 32²", lambda: dense(64, 32),
                             "diagonal", "bernoulli", exact=False, before=False),
    "unet-256": Row("U-Net of 15,000 weights, 2 images of 256², 3 classes", lambda: unet(2, 256),
                    "diagonal", exact=False, before=False, steps=5),
    "resnet-100": Row("residual network, 78,000 weights, 128 images of 32², 100 classes",
                      lambda: resnet(128, 100), "kronecker", steps=20),
    "transformer-head": Row("head of a transformer that vmap refuses, 200 rows, 5 classes",
                            lambda: transformer(200, 5), "kronecker", subset="last_layer"),
    "transformer-all": Row("all weights of that transformer, 100 rows, 5 classes",
                           lambda: transformer(100, 5), "kronecker"),
    "vocabulary": Row("its head with 2,000 classes, 100 rows", lambda: transformer(100, 2000),
                      "diagonal", subset="last_layer", exact=False, before=False),
    "vocabulary-kronecker": Row("its head with 2,000 classes, 100 rows",
                                lambda: transformer(100, 2000), "kronecker", subset="last_layer",
                                exact=False, before=False),
    "gpt2-head": Row("head of GPT-2 small, 512 rows of 128 tokens, 10 classes",
                     lambda: gpt2(512, 10), "kronecker", subset="last_layer", before=False,
                     steps=8, batch=64, gpu=True),
    "resnet50-100": Row("ResNet-50, 512 images of 224², 100 classes", lambda: resnet50(512, 100),
                        "kronecker", before=False, steps=8, batch=64, gpu=True),
}  # fmt: skip


def one(name: str, curvature: str, device: str) -> dict[str, Any]:
    """One fit, in this process."""
    import doxa

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("doxa").addHandler(handler)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = ROWS[name]
    net, x, y = row.make()
    net = trained(net.to(device), x.to(device), y.to(device), row)
    model = doxa.Model(net, row.likelihood, subset=row.subset)
    settings: dict[str, Any] = {} if curvature == "default" else {"curvature": curvature}
    method = doxa.Laplace(row.structure, train=False, **settings)
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    posterior = doxa.fit(
        model, (x.to(device), y.to(device)), method, init="given", validation=None, progress=False
    )
    refused = sum("does not run under vmap" in message for message in said)
    return {
        "seconds": clock() - began, "evidence": posterior.log_evidence, "refused": refused,
        "error": posterior.diagnostics.get("log_evidence_error"),
        "scale": posterior.diagnostics["prior_scale"], "kind": posterior.method.curvature,
    }  # fmt: skip


def run(name: str, curvature: str, device: str, source: str | None, limit: int) -> dict[str, Any]:
    """The same in a process of its own; {"late": limit} where it takes too long."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if source is not None:
        env["PYTHONPATH"] = source
    command = [sys.executable, str(HERE / "laplace_large.py"), "--one", name, "--curvature",
               curvature, "--device", device]  # fmt: skip
    return finished(command, env, limit)


def run_peer(name: str, python: str, device: str, limit: int) -> dict[str, Any]:
    """laplace-torch, exact, with its own choice of what computes the curvature."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = str(HERE / "peers" / "laplace_large_run.py")
    return finished([python, script, name, "exact", "CurvlinopsGGN", device], env, limit)


def finished(command: list[str], env: dict[str, str], limit: int) -> dict[str, Any]:
    """What a process prints in its last line; why, if it failed."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"late": limit}
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": said[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "late" in result:
        return f"stopped after {result['late']} s of a clock"
    if "failed" in result:
        return result["failed"].replace("|", "/")
    refused = f", {result['refused']} warnings" if result.get("refused", 0) > 1 else ""
    return f"{result['seconds']:.3g}{refused}"


def table(found: dict[str, Any], device: str) -> str:
    where = f"{platform.machine()}, one thread; processor seconds" if device == "cpu" else device
    lines = [
        "# Laplace for many outputs", "",
        f"`python -m benchmarks.laplace_large`, torch {torch.__version__}, {where}.", "",
        "The networks are not at a maximum: their evidence contains a large λ²/2. It shows if",
        "sampled curvature is as far from the exact one as it states (±).", "",
        "| network | structure | before, s | now, s | exact, s | laplace-torch, exact, s | log "
        "evidence | exact |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, results in found.items():
        row, now = ROWS[name], results.get("now", {})
        error = now.get("error")
        evidence = f"{now.get('evidence', float('nan')):.2f}" + (f" ± {error:.2g}" if error else "")
        exact = results.get("exact")
        was = results.get("before", {})
        known = exact or (
            was if was.get("kind") == "ggn" and now.get("kind") == "sampled" else None
        )
        theirs = f"{known['evidence']:.2f}" if known and "evidence" in known else ""
        lines.append(
            f"| {row.words} | {row.structure} | {cell(results.get('before'))} | {cell(now)} | "
            f"{cell(exact)} | {cell(results.get('peer'))} | {evidence} | {theirs} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", help="names, or all that the device can compute")
    parser.add_argument("--before", help="the src folder of another version")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--peer", help="a Python with laplace-torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=600, help="seconds for one fit")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--curvature", default="default", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(json.dumps(one(args.one, args.curvature, args.device)) + "\n")
        return
    name = "laplace_large" if args.device == "cpu" else f"laplace_large_{args.device}"
    path = args.out / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    able = [own for own, row in ROWS.items() if args.device != "cpu" or not row.gpu]
    for own in args.rows.split(",") if args.rows else able:
        results = found.setdefault(own, {})
        results["now"] = run(own, "default", args.device, None, args.limit)
        if args.exact and ROWS[own].exact:
            results["exact"] = run(own, "ggn", args.device, None, args.limit)
        if args.before and ROWS[own].before:
            results["before"] = run(own, "default", args.device, args.before, args.limit)
        if args.peer:
            results["peer"] = run_peer(own, args.peer, args.device, args.limit)
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(table(found, args.device))
    sys.stdout.write(table(found, args.device))


if __name__ == "__main__":
    main()
