"""What the networks of neural processes may and may not depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from set_tasks import network, task
from short import short
from torch import Tensor, nn

import doxa

NAMES = ("cnp", "np", "anp", "tnp", "convcnp")


def outputs(name: str, given: dict[str, Tensor], net: Any = None) -> Tensor:
    method, net = (short(name), net) if net is not None else network(name)
    if method.latent:
        eps = torch.linspace(-1, 1, method.width).double().expand(2, 1, -1)
        return net(given, eps).f[:, 0]
    lowest, highest = torch.full((1, 1), -3.0), torch.full((1, 1), 3.0)
    return net(given, *method.fixed(lowest, highest))


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_context_does_not_matter(name: str) -> None:
    given, _ = task()
    order = torch.tensor([4, 2, 7, 0, 8, 1, 3, 6, 5])
    turned = {k: v[:, order] if k.startswith("context") else v for k, v in given.items()}
    one, two = outputs(name, given), outputs(name, turned)
    assert torch.allclose(one, two, atol=1e-10)
    other = {**given, "context_y": given["context_y"] + 1}
    assert not torch.allclose(one, outputs(name, other), atol=1e-3)  # it looks at the context


@pytest.mark.parametrize("name", NAMES)
def test_what_is_masked_changes_nothing(name: str) -> None:
    """Points outside the context, and targets that are not asked for, may hold anything."""
    given, _ = task()
    junk = 50 * (1 - given["context"][..., None])
    asked = given["targets"].clone()
    asked[:, -2:] = 0
    far = given["target_x"].clone()
    far[:, -2:] = 40.0
    other = {**given, "context_x": given["context_x"] + junk, "targets": asked, "target_x": far,
             "context_y": given["context_y"] + junk}  # fmt: skip
    want, got = outputs(name, {**given, "targets": asked}), outputs(name, other)
    assert torch.allclose(got[:, :-2], want[:, :-2], atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_how_far_a_context_is_padded_changes_nothing(name: str) -> None:
    """Neither by how many points, nor by what y stands there while x is where points could be."""
    given, _ = task()
    longer = {**given}
    for key in (key for key in given if key.startswith("context")):
        more = torch.zeros_like(given[key][:, :4])
        longer[key] = torch.cat([given[key], more + 7.0 if key == "context_y" else more], 1)
    _, net = network(name)
    want = outputs(name, given, net)
    assert torch.allclose(outputs(name, longer, net), want, atol=1e-10)
    there = (1 - given["context"])[..., None]
    other = {**given, "context_y": given["context_y"] + 7.0 * there}
    assert torch.allclose(outputs(name, other, net), want, atol=1e-10)


def test_convcnp_divides_the_signal_by_the_density() -> None:
    """With layers that pass the signal on, a constant y comes back as itself at points of the
    context, however densely they lie."""
    _, net = network("convcnp")
    with torch.no_grad():
        for p in (*net.lift.parameters(), *net.blocks.parameters(), *net.head.parameters()):
            p.zero_()
        net.lift.weight[0, 1] = 1.0  # the signal to the first channel
        net.head.weight[0, 0] = 1.0  # and on to the mean
    given, _ = task()
    level = {**given, "context_y": 2.5 * given["context"][..., None]}
    found = outputs("convcnp", level, net)[..., 0]
    seen = given["context"] > 0
    assert torch.allclose(found[seen], torch.full_like(found[seen], 2.5), atol=0.05)


def test_convcnp_moves_with_its_data() -> None:
    """By 7 steps of a lattice of 4 a unit; by 0.1 of a step it does not, quite."""
    _, net = network("convcnp")
    given, _ = task()
    shifted = lambda by: {k: v + by if k.endswith("_x") else v for k, v in given.items()}  # noqa: E731
    want = outputs("convcnp", given, net)
    assert torch.allclose(outputs("convcnp", shifted(7 / 4), net), want, atol=1e-9)
    assert not torch.allclose(outputs("convcnp", shifted(0.025), net), want, atol=1e-6)


def test_an_autoregressive_target_sees_those_before_it_only() -> None:
    _, net = network("tnp", mode="autoregressive")
    given, y = task()
    rank = torch.tensor([0, 0, 0, 0, 0, 2, 0, 3, 1]).double().expand(2, -1)  # 6, 8, 5, then 7
    target_y = y.clone().requires_grad_()
    f = net(given, target_y, rank)
    sees = {}
    for j in (5, 6, 7, 8):
        (grad,) = torch.autograd.grad(f[:, j].sum(), target_y, retain_graph=True)
        sees[j] = {i for i in range(9) if bool(grad[:, i].abs().max() > 0)}
    assert sees == {6: set(), 8: {6}, 5: {6, 8}, 7: {6, 8, 5}}
    first = net(given, y, rank)[:, 6]
    assert torch.allclose(first, net(given)[:, 6], atol=1e-12)  # the first is as if asked alone


@pytest.mark.parametrize(("name", "size"), [("cnp", 215_682), ("np", 232_194), ("tnp", 222_082)])
def test_networks_are_those_of_the_comparison(name: str, size: int) -> None:
    """As many weights as Nguyen & Grover (2022) compare on functions of one input: encoders
    2-128-128-128-128, mean, 128-128-128 (256 for z), decoder 257-128-128-2; tokens of 64 numbers,
    six layers with 128 hidden units, embedding 2-64-64-64-64, head 64-128-2."""
    net = doxa.get_method(name)().network(1, 1)
    assert sum(p.numel() for p in net.parameters()) == size


@pytest.mark.parametrize("depth", [3, 4, 6])
def test_attention_stands_for_two_layers_of_an_encoder(depth: int) -> None:
    """What `depth` says: depth − 2 linear layers before attention, one less than it in the decoder,
    so that one more is a layer of width × width numbers and biases in each of the three."""
    size = lambda d: sum(  # noqa: E731
        p.numel() for p in doxa.AttentiveNP(width=16, heads=4, depth=d).network(1, 1).parameters()
    )
    net: Any = doxa.AttentiveNP(width=16, heads=4, depth=depth).network(1, 1)
    for encoder in (net.direct, net.latent):
        assert sum(isinstance(m, nn.Linear) for m in encoder.each) == depth - 2
    assert size(depth + 1) - size(depth) == 3 * (16 * 16 + 16)
