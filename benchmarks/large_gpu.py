"""Networks that people have, on a GPU: ResNet-50 and GPT-2, beside plain PyTorch in one run.

    python -m benchmarks.large_gpu [--rows resnet50,gpt2,heads] [--methods map,members,...]

**resnet50.** torchvision's, images of 224², 1,000 classes, B = 32. **gpt2.** GPT-2 small with
random weights, as a causal language model, 128 tokens, B = 16. Both are timed as plain PyTorch
would train them (fused Adam, eager), and as fits of doxa. **heads.** Four heads on a frozen GPT-2
(sequence classification): the time of the first epoch, in which the trunk runs, and of later
epochs, as multiples of forward passes alone over the rows.

A step of doxa is the median over the intervals between the ticks of a fit, the first three left
out, so that recording and capturing do not count. The memory is the peak of torch's allocator above
what was allocated when the network and the data were there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import doxa

HERE = Path(__file__).parent
Row = dict[str, Any]
Loss = Callable[[nn.Module, Any, Tensor], Tensor]


def synchronised() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


class _Enough(Exception):
    """All steps have been timed: what comes after them is not."""


class Peak:
    """The peak of allocated memory above that at the start, in GiB."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    @property
    def gib(self) -> float:
        return (torch.cuda.max_memory_allocated() - self.before) / 2**30


def plain(net: nn.Module, x: Any, y: Tensor, loss: Loss, batch: int, steps: int = 40) -> Row:
    """A training loop as one would write it by hand."""
    peak = Peak()
    net.train()
    adam = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        rows = torch.randint(len(y), (batch,), device=y.device)
        value = loss(net, x[rows], y[rows])
        adam.zero_grad()
        value.backward()
        adam.step()

    for _ in range(10):
        step()
    times = []
    for _ in range(5):
        began = synchronised()
        for _ in range(steps // 5):
            step()
        times.append((synchronised() - began) / (steps // 5))
    return {"ms": statistics.median(times) * 1e3, "GiB": peak.gib}


def ours(
    net: nn.Module, data: Any, method: Any, batch: int, steps: int = 130, **options: Any
) -> Row:
    """The time of a step of a fit, and its peak of memory."""
    peak = Peak()
    ticks: list[tuple[int, float]] = []
    began = synchronised()

    def tick(step: int, _info: Any) -> None:
        ticks.append((step, synchronised()))
        if step >= steps - 10:
            raise _Enough

    settings = {
        "members": 1, "steps": steps, "batch_size": batch, "lr": 1e-4, "schedule": "constant",
        "validation": None, "progress": False, "init": "given", "callbacks": [tick],
    } | options  # fmt: skip
    with contextlib.suppress(_Enough):
        doxa.fit(net, data, method, **settings)
    each = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(ticks)]
    return {
        "ms": statistics.median(each[3:]) * 1e3, "GiB": peak.gib, "first": ticks[0][1] - began,
    }  # fmt: skip


FITS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "map": (doxa.MAP, {}),
    "map eager": (doxa.MAP, {"engine": "loop:eager"}),
    "map tf32": (doxa.MAP, {"precision": "tf32"}),
    "map bfloat16": (doxa.MAP, {"precision": "bfloat16"}),
    "map channels-last": (doxa.MAP, {"channels_last": True}),
    "members": (doxa.MAP, {"members": 4}),
    "ivon": (doxa.IVON, {}),
    "mean-field": (lambda: doxa.MeanField(average=0.0, elbo_samples=1), {}),
    "sghmc": (lambda: doxa.SGHMC(draws=1, burn_in=129, thin=1), {"steps": 130}),
    "mc-dropout": (lambda: "mc-dropout", {}),
}


def measured(
    name: str, make: Callable[[], nn.Module], x: Tensor, y: Tensor, loss: Loss, batch: int,
    likelihood: Any, methods: list[str],
) -> Row:  # fmt: skip
    found: Row = {}

    def keep(key: str, call: Callable[[], Row]) -> None:
        try:
            found[key] = call()
        except Exception as error:  # one row that fails leaves the others
            found[key] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(name, key, json.dumps(found[key]), flush=True)

    keep("plain", lambda: plain(make().cuda(), x, y, loss, batch))
    if "map tf32" in methods:
        with doxa_tf32():
            keep("plain tf32", lambda: plain(make().cuda(), x, y, loss, batch))
    for key in methods:
        method, options = FITS[key]
        if key == "map channels-last" and name != "resnet50":
            continue
        keep(key, lambda m=method, o=options: ours(
            make().cuda(), (x, y), m(), batch, likelihood=likelihood, **o))  # fmt: skip
    keep("plain again", lambda: plain(make().cuda(), x, y, loss, batch))
    return found


@contextlib.contextmanager
def doxa_tf32() -> Any:
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def resnet50(methods: list[str]) -> Row:
    from torchvision.models import resnet50 as make

    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 3, 224, 224, generator=g).cuda()
    y = torch.randint(1000, (256,), generator=g).cuda()
    loss: Loss = lambda net, x, y: F.cross_entropy(net(x), y)  # noqa: E731
    return measured("resnet50", make, x, y, loss, 32, "categorical", methods)


def gpt2(methods: list[str]) -> Row:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(50257, (256, 128), generator=g).cuda()
    y = torch.cat([x[:, 1:], torch.full_like(x[:, :1], -100)], 1)
    loss: Loss = lambda net, x, y: F.cross_entropy(  # noqa: E731
        net(x).logits.flatten(0, 1), y.flatten()
    )
    likelihood = doxa.Categorical(ignore_index=-100, classes_last=True)
    return measured("gpt2", lambda: GPT2LMHeadModel(config), x, y, loss, 16, likelihood, methods)


def heads(_: list[str]) -> Row:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(num_labels=10, pad_token_id=0, use_cache=False)
    net = GPT2ForSequenceClassification(config).cuda().eval().requires_grad_(False)
    net.score.requires_grad_(True)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 50257, (1024, 128), generator=g).cuda()
    y = torch.randint(10, (1024,), generator=g).cuda()

    def alone() -> None:
        with torch.no_grad():
            for part in x.split(16):
                net(part)

    def seconds(call: Callable[[], Any]) -> float:
        began = synchronised()
        call()
        return synchronised() - began

    def epochs(number: int) -> float:
        return seconds(lambda: doxa.fit(
            net, (x, y), "deep-ensemble", likelihood="categorical", members=4,
            steps=64 * number, batch_size=16, validation=None, progress=False,
        ))  # fmt: skip

    alone()
    epochs(1)
    peak = Peak()
    forward = statistics.median(seconds(alone) for _ in range(3))
    one, three, many = epochs(1), epochs(3), epochs(23)
    found = {
        "forward": forward, "first": one / forward, "later": (many - three) / 20 / forward,
        "seconds": [one, three, many], "GiB": peak.gib,
    }  # fmt: skip
    print("heads", json.dumps(found), flush=True)
    return found


ROWS: dict[str, Callable[[list[str]], Row]] = {"resnet50": resnet50, "gpt2": gpt2, "heads": heads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--methods", default=",".join(FITS))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "large_gpu.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    torch.set_num_threads(1)
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.rows.split(","):
        try:
            found[name] = found.get(name, {}) | ROWS[name](arguments.methods.split(","))
        except Exception as error:  # one network that fails leaves the others
            print(name, "failed:", type(error).__name__, str(error)[:500], flush=True)
        found["machine"] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
