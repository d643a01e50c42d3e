"""Studies: exact posteriors, the best design, adaptive designs against fixed and random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from examples import load
from scipy.stats import norm
from torch import Tensor
from torch.distributions import Bernoulli, Independent, MultivariateNormal, Normal
from torch.optim.optimizer import register_optimizer_step_pre_hook

import doxa
from doxa.decide import eig
from doxa.decide.design import (  # fmt: skip
    Adaptive,
    Box,
    Choices,
    Experiment,
    Fixed,
    Random,
    Reals,
    Study,
    best_design,
    information,
    labelling,
    location_finding,
    rehearse,
    train_policy,
    working_memory,
)
from doxa.errors import DataError, MethodError, NumericalError, ShapeError

ONE = torch.tensor(1.0, dtype=torch.float64)


def test_the_exact_posterior_after_three_lists() -> None:
    """l = (5, 7, 9), y = (1, 1, 0): 7.745 ± 1.229, by quadrature in other software."""
    study = Study(working_memory())
    assert float(study.next()) == 7.0
    for length, outcome in zip((5, 7, 9), (1, 1, 0), strict=True):
        study.tell(length, outcome)
    assert float(study.posterior.mean) == pytest.approx(7.745, abs=1e-3)
    assert float(study.posterior.std) == pytest.approx(1.229, abs=1e-3)
    drawn = Study(working_memory(), "importance", draws=20_000)
    for design, outcome in study.history:
        drawn.tell(design, outcome)
    assert float(drawn.posterior.mean) == pytest.approx(7.745, abs=0.04)  # 4 errors of 8,000 draws


def test_a_study_refuses_what_cannot_be() -> None:
    study = Study(working_memory())
    with pytest.raises(
        DataError, match=r"the outcome 2\.0 is not possible; it must be one of 0\.0, 1\.0"
    ):
        study.tell(7, 2)
    with pytest.raises(DataError, match="outside Choices"):
        study.tell(7.5, 1)
    with pytest.raises(ShapeError, match="the outcome has shape"):
        study.tell(7, [1])
    with pytest.raises(MethodError, match="inference must be one of"):
        Study(working_memory(), "grit")
    assert study.history == []


def test_an_outcome_counts_once_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that fails leaves the study as it was, and the outcome can be told again."""
    from doxa.decide.design import study as module

    def fails(*args: object, **kwargs: object) -> None:
        raise NumericalError("the sampler diverged")

    for inference in ("importance", "sample"):
        study = Study(slopes(), inference, draws=100)
        sampler = module.sample
        before = study.posterior
        monkeypatch.setattr(module, "sample", fails)
        for _ in range(2):
            with pytest.raises(NumericalError, match="diverged"):
                study.tell([1.0, 0.0], 4.5)  # few draws of the prior explain it
        assert study.history == [] and study.renewed == 0 and study.posterior is before
        monkeypatch.setattr(module, "sample", sampler)


def slopes(noise: float = 0.3) -> Experiment:
    """y = dᵀθ + ε with θ ~ N(0, I) in the plane: conjugate."""
    prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
    likelihood = lambda t, d: Normal((t * d).sum(-1), noise * ONE)  # noqa: E731
    return Experiment(prior, likelihood, space=Box([-1.0, -1.0], [1.0, 1.0]))


@pytest.mark.slow
def test_draws_are_renewed_by_a_sampler() -> None:
    """Ten outcomes leave few draws of the prior: NUTS, against the conjugate posterior."""
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0)).double().clamp(-1, 1)
    y = x @ torch.tensor([1.5, -0.5]).double()
    study = Study(slopes(), draws=400)
    for design, outcome in zip(x, y, strict=True):
        study.tell(design, outcome)
    precision = torch.eye(2).double() + x.T @ x / 0.09
    exact = torch.linalg.solve(precision, x.T @ y / 0.09)
    std = torch.linalg.inv(precision).diagonal().sqrt()
    assert study.inference == "importance" and study.renewed >= 1
    assert ((study.posterior.mean - exact) / std).abs().max() < 0.3
    assert (study.posterior.std / std - 1).abs().max() < 0.25


def test_a_sampler_draws_from_prior_and_outcomes() -> None:
    """y = dᵀθ + ε with noise 1, and an outcome of 3 along the first axis: N(1.5, 1/2) there, and
    the prior across, where nothing was measured. 400 draws: errors are several times smaller."""
    study = Study(slopes(1.0), "sample", draws=400, sampler=doxa.Metropolis(100, 400, 10))
    study.tell([1.0, 0.0], 3.0)
    assert study.renewed == 1
    mean, std = study.posterior.mean.tolist(), study.posterior.std.tolist()
    assert mean == pytest.approx([1.5, 0.0], abs=0.35)
    assert std == pytest.approx([2**-0.5, 1.0], rel=0.25)


def test_a_prior_of_several_numbers_is_their_product() -> None:
    """Whether their axis is called a batch or an event."""
    spread = torch.tensor([1.0, 2.0, 0.5]).double()
    theta = torch.tensor([[0.3, -1.0, 0.2], [2.0, 0.0, -1.0]]).double()
    want = torch.tensor(norm.logpdf(theta.numpy(), 0.0, spread.numpy()).sum(1))
    plain = Normal(torch.zeros(3).double(), spread)
    for prior in (plain, Independent(plain, 1)):
        line = Experiment(prior, lambda t, d: Normal((t * d).sum(-1), ONE), space=Reals(3))
        assert torch.allclose(line.prior.log_prob(theta), want)


def test_every_round_of_a_study_has_draws_of_its_own() -> None:
    """A measurement at d = 0 is noise and changes no belief: the gains are estimated anew."""
    study = Study(slopes(), draws=100, points=4, outer=64, inner=16)
    first = study.gains().values
    assert torch.equal(first, study.gains().values)
    study.tell([0.0, 0.0], 0.3)
    second = study.gains().values
    assert not torch.equal(first, second)
    assert torch.allclose(first, second, atol=1.0)


def bump() -> Experiment:
    """y = 3 exp(−(d − 2)²) θ + ε: the gain ½ log(1 + 9 exp(−2 (d − 2)²)) is largest at 2."""
    likelihood = lambda t, d: Normal(3 * (-(d - 2).square()).exp() * t, ONE)  # noqa: E731
    return Experiment(Normal(0 * ONE, ONE), likelihood, space=Box(0.0, 5.0))


@pytest.mark.parametrize(("way", "steps"), [("grid", None), ("gradient", 25)])
def test_the_best_design(way: str, steps: int | None) -> None:
    found = best_design(bump(), way, steps=steps, starts=4, outer=256, inner=100)
    assert float(found.design) == pytest.approx(2.0, abs=0.15)
    assert found.value == pytest.approx(1.151, abs=4 * found.error)  # ½ log 10


def test_the_expected_improvement_is_its_integral() -> None:
    """E max(f − best, 0) of normals below, at and above the best value, on a grid of f."""
    from doxa.decide.design.optimise import _improvement

    mean = torch.tensor([-1.0, 0.5, 2.0, 0.0]).double()
    std = torch.tensor([0.7, 1.0, 0.3, 2.0]).double()
    values = torch.tensor([0.1, 0.5, -0.3]).double()
    told = Told(Told(mean=mean, epistemic=std.square()))
    z = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
    f = mean + std * z[:, None]
    density = (-0.5 * z.square()).exp()[:, None] / (2 * torch.pi) ** 0.5
    want = ((f - 0.5).clamp_min(0) * density).sum(0) * float(z[1] - z[0])
    assert torch.allclose(_improvement(told, torch.zeros(4, 1), values), want, atol=1e-7)


class Told:
    """Predicts what it was given."""

    def __init__(self, answer: Any = None, **values: Tensor) -> None:
        self.answer = answer
        vars(self).update(values)

    def predict(self, x: Tensor) -> Any:
        return self.answer


@pytest.mark.slow
def test_the_best_design_by_a_gaussian_process() -> None:
    pytest.importorskip("gpytorch")
    found = best_design(bump(), "bayes", steps=8, starts=4, outer=512, inner=100)
    assert float(found.design) == pytest.approx(2.0, abs=0.25)
    assert len(found.values) == 12


def test_adaptive_beats_fixed_beats_random() -> None:
    """400 people, 12 lists: the posterior mean is nearer, and the posterior narrower. The standard
    error of either is 4 %, so the margins are five of them and more."""
    truth = 7 + 2 * torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    fixed = torch.tensor([3, 4, 5, 6, 6, 7, 7, 8, 8, 9, 10, 11]).double()
    found = {
        name: rehearse(working_memory(), truth, 12, way)
        for name, way in [("adaptive", "adaptive"), ("fixed", fixed), ("random", "random")]
    }
    error = {name: float(run.error[-1]) for name, run in found.items()}
    assert error["adaptive"] < 0.8 * error["fixed"] < 0.8 * error["random"]
    for run in found.values():  # a posterior is as wide as it is wrong
        assert float(run.std[-1].square().mean().sqrt()) == pytest.approx(
            float(run.error[-1]), rel=0.15
        )
    one = Study(working_memory())  # one person again, alone
    for row, y in zip(
        found["adaptive"].designs[:, 3], found["adaptive"].outcomes[:, 3], strict=True
    ):
        assert float(one.next()) == float(one.candidates[row])
        one.tell(one.candidates[row], float(y))
    torch.testing.assert_close(one.posterior.mean, found["adaptive"].mean[-1, 3])


def test_noise_is_no_information() -> None:
    """A fair coin has the larger entropy, and tells nothing: it is never tossed."""
    likelihood = lambda t, d: Bernoulli(logits=d * (t - 2))  # noqa: E731
    coin = Experiment(Normal(0 * ONE, ONE), likelihood, space=Choices(torch.tensor([0.0, 1.0])))
    run = rehearse(coin, torch.randn(20, generator=torch.Generator().manual_seed(0)), 3)
    assert (run.designs == 1).all()


def test_fixed_designs_are_measured_where_they_are_given() -> None:
    """At the ends of a box exactly; from there they can be moved."""
    for dtype in (torch.float32, torch.float64):
        ends = torch.tensor([10.0, 0.0, 3.0, 9.95], dtype=dtype)
        box = Box(torch.tensor(0.0, dtype=dtype), torch.tensor(10.0, dtype=dtype))
        policy = Fixed(box, 4, ends)
        found = torch.stack([policy.design(1, t)[0] for t in range(4)])
        assert found[:2].tolist() == [10.0, 0.0] and found.dtype == dtype
        torch.testing.assert_close(found.detach(), ends)
        (slope,) = torch.autograd.grad(found.sum(), policy.raw)
        assert (slope > 0).all()
    given: Any = [10.0]
    assert float(Fixed(Box(0, 10), 1, given).design(1, 0).detach()) == 10.0


def test_information_of_a_fixed_run() -> None:
    """y_t = dᵀ_t θ + ε: the total is ½ log det(I + DᵀD/σ²), between the bounds."""
    designs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.7, 0.7]]).double()
    exact = float(0.5 * torch.logdet(torch.eye(2).double() + designs.T @ designs / 0.25))
    policy = Fixed(Reals(2), 3, designs)
    prior = Independent(Normal(torch.zeros(2).double(), torch.ones(2).double()), 1)
    line = Experiment(prior, lambda t, d: Normal((t * d).sum(-1), 0.5 * ONE), space=Reals(2))
    found = information(line, policy, 3, rollouts=1024, inner=800)
    assert found.lower - 3 * found.lower_error < exact < found.upper + 3 * found.upper_error
    assert found.upper - found.lower < 0.1
    assert found.lower == pytest.approx(exact, abs=4 * found.lower_error)


@pytest.mark.parametrize("inner", [1, 3])
def test_outcomes_that_say_nothing_hold_no_information(inner: int) -> None:
    """y does not depend on θ: both bounds are zero at every rollout, however few contrasts."""
    blank = lambda t, d: Normal(0 * (t + d[..., 0]), ONE)  # noqa: E731
    blind = Experiment(Normal(0 * ONE, ONE), blank, space=Reals(1))
    policy = Fixed(Reals(1), 2, torch.zeros(2, 1).double())
    found = information(blind, policy, 2, rollouts=32, inner=inner)
    assert found.lower == pytest.approx(0.0, abs=1e-12)
    assert found.upper == pytest.approx(0.0, abs=1e-12)
    assert found.lower_error < 1e-12 and found.upper_error < 1e-12


@pytest.mark.slow
def test_a_policy_learns_to_adapt() -> None:
    """Location finding, one source, five measurements: sPCE above random's by six errors."""
    experiment = location_finding(1)
    policy = Adaptive(experiment.space, hidden=(64,))
    train_policy(experiment, policy, 5, updates=300, outer=128, inner=127, rate=3e-3)
    learned = information(experiment, policy, 5, rollouts=1024, inner=2000)
    random = information(experiment, Random(Reals(2)), 5, rollouts=1024, inner=2000)
    assert learned.lower > random.lower + 6 * random.lower_error


@pytest.mark.slow
def test_a_policy_learns_discrete_outcomes_by_the_score_function() -> None:
    """One list of digits: the best fixed length is 7, from a start at 3."""
    start = torch.tensor([3.0]).double()
    box = Box(torch.tensor(1.0).double(), torch.tensor(15.0).double())
    policy = Fixed(box, 1, start)
    span = working_memory()
    free = Experiment(span.prior, span.likelihood, space=box)
    train_policy(free, policy, 1, updates=150, outer=512, inner=128, rate=0.1)
    assert float(policy.design(1, 0).detach()) == pytest.approx(7.0, abs=0.7)


def test_labelling_a_row_is_bald() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20, 6, 3, generator=generator, dtype=torch.float64)
    p = doxa.Predictive.from_probs(logits.softmax(2))
    found = eig(labelling(p), None, "exact").values
    torch.testing.assert_close(found, p.mutual_information)


def test_labelling_two_rows_counts_what_they_share_once() -> None:
    """Rows 0 and 1 are the same row: together they tell less than twice, more than once."""
    generator = torch.Generator().manual_seed(1)
    probs = (2 * torch.randn(20, 3, 2, generator=generator, dtype=torch.float64)).softmax(2)
    probs[:, 1] = probs[:, 0]
    p = doxa.Predictive.from_probs(probs)
    pairs = torch.tensor([[0, 1], [0, 2]]).double()
    found = eig(labelling(p, batch=2), pairs, "exact").values
    one = p.mutual_information
    joint = torch.einsum("sa,sb->sab", probs[:, 0], probs[:, 2])  # by hand
    entropy = lambda q: torch.special.entr(q).sum()  # noqa: E731
    by_hand = entropy(joint.mean(0)) - entropy(joint) / 20
    assert float(found[1]) == pytest.approx(float(by_hand), abs=1e-9)
    assert one[0] < found[0] < 2 * one[0]


def test_labelling_numbers() -> None:
    """f ~ N(0, s²) at a row: ½ log(1 + s²/σ²), from 2,000 functions."""
    generator = torch.Generator().manual_seed(2)
    f = torch.randn(2000, 2, generator=generator).double() * torch.tensor([0.5, 2.0]).double()
    p = doxa.Predictive.from_samples(f, doxa.Gaussian(0.5))
    found = eig(labelling(p), None, "pce", outer=4000, inner=400)
    exact = 0.5 * torch.log1p(torch.tensor([1.0, 16.0]).double())
    torch.testing.assert_close(found.values, exact, atol=0.08, rtol=0)


def test_labelling_two_classes_by_one_logit_is_bald() -> None:
    """A Bernoulli of one logit is a table of two classes; counts are not supported."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(20, 4, generator=generator, dtype=torch.float64)
    p = doxa.Predictive.from_samples(logits, doxa.Bernoulli())
    yes = logits.sigmoid()
    table = doxa.Predictive.from_probs(torch.stack([1 - yes, yes], 2))
    found = eig(labelling(p), None, "exact").values
    torch.testing.assert_close(found, table.mutual_information)
    with pytest.raises(MethodError, match="labels of poisson are not supported"):
        labelling(doxa.Predictive.from_samples(logits, doxa.Poisson()))


def test_an_outcome_of_two_answers_is_checked_as_a_whole() -> None:
    """Two answers per list: each of the four pairs can be; one answer of 2 cannot, though the other
    can. Two answers at once are worth as much as the same two one by one."""
    lists = working_memory()

    def two(theta: Tensor, length: Tensor) -> Independent:
        logits = (theta - length).unsqueeze(-1).expand(*(theta - length).shape, 2)
        return Independent(Bernoulli(logits=logits), 1)

    pairs, singles = Study(Experiment(lists.prior, two, space=lists.space)), Study(lists)
    with pytest.raises(DataError, match=r"\[1\.0, 2\.0\] is not possible"):
        pairs.tell(7, [1, 2])
    for outcome in ([0, 1], [1, 1], [1, 0], [0, 0]):
        pairs.tell(7, outcome)
        for one in outcome:
            singles.tell(7, one)
    assert float(pairs.posterior.mean) == pytest.approx(float(singles.posterior.mean), abs=1e-4)
    assert float(pairs.posterior.std) == pytest.approx(float(singles.posterior.std), abs=1e-4)


def test_the_rate_of_a_policys_training_falls_as_a_cosine() -> None:
    """Of three updates: ½(1 + cos πt/3) of the rate, which is 1, ¾ and ¼ of it."""
    rates: list[float] = []
    hook = register_optimizer_step_pre_hook(
        lambda adam, *_: rates.append(adam.param_groups[0]["lr"])
    )
    try:
        experiment = location_finding(1)
        policy = Adaptive(experiment.space, hidden=(4,))
        train_policy(experiment, policy, 2, updates=3, outer=8, inner=7, rate=0.04)
    finally:
        hook.remove()
    assert rates == pytest.approx([0.04, 0.03, 0.01])


def test_policies_need_gradients() -> None:
    with pytest.raises(MethodError, match="needs a Box or Reals"):
        Adaptive(working_memory().space)
    with pytest.raises(MethodError, match="has no gradient"):
        best_design(working_memory(), "gradient")
    with pytest.raises(MethodError, match="nothing to learn"):
        train_policy(location_finding(), Random(Reals(2)), 2)


@pytest.mark.gpu
def test_a_run_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    experiment = location_finding(1, device="cuda")
    policy = Adaptive(experiment.space, hidden=(32,)).cuda()
    done = train_policy(experiment, policy, 3, updates=20, outer=64, inner=63)
    found: Tensor = next(policy.parameters())
    assert done.captured and bool(torch.isfinite(found).all())


@pytest.mark.slow
def test_the_example_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example = load("working_memory")
    fixed = torch.tensor([5, 6, 7, 7, 7, 7, 7, 7, 7, 7, 8, 8]).double()
    found = example.people(50, fixed)
    example.draw(found, fixed, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    assert found["adaptive"].error[0] == found["random"].error[0]


def test_errors_of_information_fall_with_the_root_of_the_rollouts() -> None:
    """Four times the rollouts, half the error; a sample's deviation is known to a tenth or so."""
    line = Experiment(Normal(0 * ONE, ONE), lambda t, d: Normal(t * d[..., 0], ONE), space=Reals(1))
    policy = Fixed(Reals(1), 1, torch.ones(1, 1).double())
    few, many = (information(line, policy, 1, rollouts=n, inner=200) for n in (256, 1024))
    assert (few.rollouts, many.rollouts) == (256, 1024)
    assert many.lower_error / few.lower_error == pytest.approx(0.5, rel=0.3)
    assert many.upper_error / few.upper_error == pytest.approx(0.5, rel=0.3)
