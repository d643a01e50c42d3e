"""Parts of a transition, recorded or compiled: the same chain as eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bare_density import gaussian
from torch import Tensor

import doxa
from doxa.engine import execute
from doxa.engine.execute import Executor
from doxa.engine.simplify import simplify


def correlated(size: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    root = torch.randn(size, size, generator=g).double()
    return root @ root.T + torch.eye(size).double()


def draws(mode: str, method: Any) -> doxa.Draws:
    density = gaussian(correlated(6))
    start = {"a": torch.zeros(2), "b": torch.zeros(4)}
    return doxa.sample(
        lambda p: density(torch.cat([p["a"], p["b"]])), start, method, 3, engine=f"stack:{mode}",
        progress=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mass", ["diagonal", "full"])
@pytest.mark.parametrize("mode", ["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def test_nuts_goes_the_same_way_in_every_mode(mode: str, mass: str) -> None:
    """Rounding differs, and a chain forgets it slowly: the first transitions agree."""
    method = doxa.NUTS(draws=12, burn_in=0, mass=mass, max_depth=6)
    eager, other = draws("eager", method), draws(mode, method)
    assert other.diagnostics["mode"] == mode
    assert torch.equal(eager.stats["leapfrogs"], other.stats["leapfrogs"])
    assert float(eager.stats["leapfrogs"].max()) > 20  # beyond the numbers drawn at the start
    assert torch.allclose(eager.theta, other.theta, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_run_compiled_on_the_way_is_resumed_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled after 200 leaves: stopped before that, and after it, when a tree is planted by what
    was compiled."""
    monkeypatch.setattr(execute, "choose_executor", lambda step, *_, **__: Executor(step))
    monkeypatch.setattr(execute, "compile_after", lambda *_: 200)
    density = gaussian(correlated(6))

    def run(**options: Any) -> Tensor:
        method = doxa.NUTS(draws=40, burn_in=20, max_depth=5)
        start = {"a": torch.zeros(6)}
        found = doxa.sample(lambda p: density(p["a"]), start, method, 2, progress=False, **options)
        assert found.diagnostics["mode"] == "compiled"
        return found.theta

    want = run()
    for stop in (2, 50):

        def interrupt(step: int, info: Any, stop: int = stop) -> None:
            if step >= stop:
                raise KeyboardInterrupt

        kept = {"checkpoint": tmp_path / str(stop), "checkpoint_every": 0}
        with pytest.raises(KeyboardInterrupt):
            run(callbacks=[interrupt], **kept)
        assert torch.equal(run(**kept), want), stop


@pytest.mark.parametrize(("chains", "rows", "turned"), [(4, 50, True), (60, 50, False)])
def test_products_with_few_chains_are_turned(chains: int, rows: int, turned: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0)).double()
    beta = torch.randn(chains, 5, generator=torch.Generator().manual_seed(1)).double()
    y = torch.arange(rows).double()
    fit = torch.func.vmap(lambda b: (y - x @ b).square().sum())
    module = simplify(make_fx(lambda b: [fit(b)])(beta), [beta])
    (out,) = module(beta)
    assert torch.allclose(out, (y - beta @ x.T).square().sum(1), rtol=1e-12)
    (product,) = (n for n in module.graph.nodes if n.target is torch.ops.aten.mm.default)
    assert (product.args[0].op != "get_attr") == turned  # V Aᵀ, not A Vᵀ with A the data
