"""What settings ask of each other, and of a run, before anything is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from doxa.data import free_memory
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import functional, layers, links
from doxa.laplace.curvature import output_size
from doxa.laplace.statistics import Sums
from doxa.method import Run

if TYPE_CHECKING:
    from doxa.laplace.laplace import Laplace

_FULL = 2000  # weights of which a full matrix is made in some three seconds
_MOST_FULL = 5000  # the same, in half a minute


def check_settings(method: Laplace) -> None:
    held_whole = method.structure in ("auto", "full")
    if method.polish and not held_whole:
        raise MethodError("polish solves with the full matrix: use structure='full'")
    if method.curvature == "hessian" and not held_whole:
        raise MethodError("curvature='hessian' is held whole: use structure='full', or 'ggn'")
    if method.rows is not None and method.structure != "functional":
        raise MethodError("rows are those of a kernel: use structure='functional'")
    if method.subnetwork is not None and not (held_whole and method.curvature == "ggn"):
        raise MethodError("a subnetwork has a full Gauss–Newton matrix: use structure='full'")
    if method.prior_scale == "layer" and method.structure == "functional":
        raise MethodError("a kernel has one scale: use prior_scale='shared', or structure='full'")
    if method.link not in links.DRAWN and method.predictive != "linearised":
        raise MethodError(
            f"link={method.link!r} is for Gaussian logits: use predictive='linearised', or "
            "link='samples'"
        )
    if method.centre == "mean" and method.predictive != "linearised":
        raise MethodError("centre='mean' is that of the linearised network: use 'linearised'")
    if not method.evidence_steps:
        return
    if not method.train:
        raise MethodError("evidence_steps are steps of training: use train=True, or 0")
    if method.subnetwork is not None:
        raise MethodError("a subnetwork is chosen after training: use evidence_steps=0")
    if method.curvature == "hessian":
        raise MethodError(
            "before a maximum the Hessian is no precision: with evidence_steps, use curvature='ggn'"
        )


def structure(method: Laplace, run: Run) -> str:
    """The structure that is named; of "auto", the full matrix where weights, or rows × outputs, are
    few, or where a setting needs it; else the factors of layers, or what the network can have in
    their place."""
    if method.structure != "auto":
        return method.structure
    weights = len(run.subset_index)
    needed = method.polish or method.curvature == "hessian" or method.subnetwork is not None
    if needed or weights <= _FULL:
        return "full"
    if _few_rows(method, run):
        return "functional"
    if has_factors(run):
        return "kronecker"
    return "full" if weights <= _MOST_FULL else "diagonal"


def has_factors(run: Run) -> bool:
    return bool(run.prior.is_gaussian) and layers.factored(run.net, run.net.subset_names)


def _few_rows(method: Laplace, run: Run) -> bool:
    """Whether a kernel, in all runs, is as small as a matrix of few weights, and has what it needs:
    one scale of a Gaussian prior, and one level of noise."""
    longest = max(map(len, run.rows.rows))
    if longest * output_size(run.net.output) > _FULL or not run.prior.is_gaussian:
        return False
    return method.prior_scale == "shared" and Sums(functional.Kernel()).groups(run) == 1


def check_run(method: Laplace, run: Run, sums: Sums) -> None:
    if not method.train and run.settings.fresh:
        raise MethodError(
            "train=False takes the weights as they are, but init='fresh' would replace them by "
            "random ones: use fit(..., init='given') with a trained network"
        )
    if method.tunes(run) and not run.prior.is_gaussian:
        raise MethodError(
            f"tune={method.tune!r} scales a Gaussian prior: use Normal or FanInNormal, or None"
        )
    if method.tune == "validation" and run.rows.validation is None:
        raise MethodError(
            "tune='validation' needs held-out rows: use fit(..., validation=0.1), or "
            "validation=(x, y) with rows that a trained network has not seen"
        )
    links.check(method.link, run.likelihood)
    if method.centre == "mean" and not run.likelihood.classifies:
        raise MethodError(
            f"centre='mean' is for classes, and the likelihood is {run.likelihood.name}: use "
            "centre='mode' (with Gaussian noise they are the same)"
        )
    if method.subnetwork is not None and not run.prior.is_gaussian:
        raise MethodError("a subnetwork needs a Gaussian prior: use Normal or FanInNormal")
    if method.evidence_steps and not (method.tunes(run) or sums.learns_noise(run)):
        raise MethodError(
            "evidence_steps re-estimate learned noise and the prior's scale, and here neither is "
            "free: use tune='evidence', or 0"
        )
    _check_memory(method, run, sums)


def _check_memory(method: Laplace, run: Run, sums: Sums) -> None:
    size, groups = len(run.subset_index), sums.groups(run)
    need = sums.form.bytes(run, groups)
    if method.structure == "functional":
        functional.check(run, need, groups)
    if need > 0.8 * free_memory(run.device):
        smaller = "kronecker" if method.structure == "full" else "diagonal"
        raise MemoryBudgetError(
            f"{run.size} {method.structure} matrices over {size} weights take "
            f"{need / 2**30:.3g} GiB; use structure={smaller!r}, subset='last_layer', or fewer "
            "members at once"
        )
