"""The nonlinear model of two weights: draws have the moments of its posterior on a grid."""

from __future__ import annotations

import examples
import pytest
import torch

from doxa.density.draws import summarise

example = examples.load("posterior_on_a_grid")


@pytest.mark.slow
def test_draws_have_the_moments_of_the_grid() -> None:
    """Six means within three Monte Carlo standard errors; by chance one in sixty runs is not."""
    grid, draws = example.on_a_grid(), example.drawn()
    assert draws.status == "ok"

    def moments(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        slope = a * torch.tanh(0.8 * b)  # f(0.8)
        return {"a": a, "b": b, "ab": a * b, "a²": a.square(), "b²": b.square(), "f": slope}

    found = summarise(moments(draws["a"], draws["b"]))
    want = torch.stack([grid.mean(value) for value in moments(*grid.pairs()).values()])
    assert ((found["mean"] - want).abs() < 3 * found["mcse"]).all()
    assert (found["mcse"] < 0.12 * found["sd"]).all()  # and that is not much


def test_the_grid_is_fine_enough() -> None:
    """Half as many points a side give the same means."""
    fine, coarse = example.on_a_grid(800), example.on_a_grid(400)
    for k in (0, 1):
        means = [float(grid.mean(grid.pairs()[k])) for grid in (fine, coarse)]
        assert abs(means[0] - means[1]) < 1e-4
