"""Advice: what to try, as text and as Python that runs as it is printed.

In the code `net` and `data` are the arguments of `fit`, `posterior` is its result, and `held_out`
are rows (x, y) that the fit has not used. Advice depends on the posterior: on its method, its
likelihood, and the options that are already set. `refit` writes the call of `fit` again, with
changes; `written` writes the method.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from doxa.diagnose.data import DiagnosticData
from doxa.likelihoods import Heads
from doxa.posterior import Posterior
from doxa.priors import Normal
from doxa.registry import get_method, methods

NAMES = (
    "net and data are the arguments of fit, posterior is its result, held_out are rows (x, y) that "
    "the fit has not used"
)
WIDTH = 79  # of a line of code
_INDENT = "    "
_LITERAL = (str, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True)
class Advice:
    """Text, and snippets of Python in the same order.

    A comment at the top of each snippet repeats its part of the text. Some advice has no snippet.
    """

    words: str
    code: tuple[str, ...] = ()


def coded(text: str, code: str) -> Advice:
    return Advice(text, (f"# {text}\n{code}",))


def any_of(*each: Advice | str | None) -> Advice:
    """Several remedies, the one to try first at the front."""
    given = [Advice(one) if isinstance(one, str) else one for one in each if one]
    return Advice("; or ".join(a.words for a in given), tuple(s for a in given for s in a.code))


MORE_ROWS = Advice("more rows")
NEW_ROWS = coded(
    "run the diagnostics with held-out rows",
    "doxa.diagnose.diagnose(posterior, data, held_out)",
)


def standardise(case: DiagnosticData) -> Advice | None:
    """None if the fit already standardised its data."""
    scales = case.posterior.scales
    if scales.x_loc is not None or scales.y_loc is not None:
        return None
    return coded("standardise x and y", refit(case, standardize=True))


def calmer(case: DiagnosticData) -> Advice:
    """For a fit that diverged: unit scales and a tenth of the learning rate, together."""
    changes: dict[str, Any] = {}
    texts = []
    if standardise(case) is not None:
        changes["standardize"] = True
        texts.append("standardise x and y")
    method = case.base.method
    if method.uses_rate:
        given = case.posterior.metadata.get("asked", {}).get("lr")
        changes["lr"] = float(f"{(given or method.default_rate) / 10:.3g}")
        texts.append("a tenth of the learning rate")
    if not texts:
        return longer(case)
    return coded(" and ".join(texts), refit(case, **changes))


def longer(case: DiagnosticData) -> Advice:
    """More draws for MCMC, more steps for any other method."""
    method = case.base.method
    lengths = {n: 2 * max(50, method.settings()[n]) for n in ("burn_in", "draws") if has(method, n)}
    if lengths:
        code = refit(case, written(case, **lengths))
        text = "twice the burn-in and the draws" if len(lengths) == 2 else "twice the draws"
        return coded(text, code)
    steps = int(case.posterior.diagnostics.get("steps") or 0)
    if not steps:  # computed in one pass
        return another(case, "map", "deep-ensemble", "gp", "linear")
    return coded("more steps", refit(case, steps=2 * steps))


def early_stopping(case: DiagnosticData) -> Advice | None:
    """None if the fit already used held-out rows, or if the method does not overfit."""
    method = case.base.method
    if case.posterior.history.get("validation") or not method.overfits:
        return None
    return coded("stop early, on held-out rows", refit(case, validation=0.1))


def narrower_prior(case: DiagnosticData) -> Advice | None:
    if not _has_network(case):
        return None
    return coded("a narrower prior", refit(case, prior="doxa.Normal(0.5)"))


def recalibrate(posterior: Posterior) -> Advice | None:
    """Recalibration of the kind that suits the targets; None for several heads."""
    likelihood = posterior.base_likelihood
    if isinstance(likelihood, Heads):
        return None
    if likelihood.discrete and not likelihood.classifies:
        code = call("posterior = doxa.evaluate.conformal", ["posterior", "held_out", "0.9"])
        return coded("conformal intervals, on held-out rows", code)
    kind = '"temperature"' if likelihood.classifies else '"quantile"'
    code = call("posterior = doxa.evaluate.recalibrate", ["posterior", "held_out", kind])
    return coded("recalibrate, on held-out rows", code)


def ensemble(case: DiagnosticData) -> Advice | None:
    """An ensemble, or more members if the method is an ensemble."""
    if not _has_network(case):
        return None
    if case.base.method.is_ensemble:
        return coded("more members", refit(case, members=2 * case.base.members))
    return coded("an ensemble", refit(case, '"deep-ensemble"'))


def another(case: DiagnosticData, *names: str) -> Advice:
    """The first of these methods that supports the task and is not the method of the posterior."""
    likelihood = case.posterior.base_likelihood
    task = "classification" if likelihood.classifies else "regression"
    task = "tasks" if _learns_tasks(case) else task
    own = case.base.method.name
    for name in names:
        row = methods()[name]
        without = not get_method(name).needs_network  # these have Gaussian noise only
        fits = likelihood.is_normal if without else _has_network(case)
        if name != own and task in row.tasks and fits:
            return coded(f"{name!r}", refit(case, f'"{name}"', network=not without))
    return Advice("another method")


def colder(case: DiagnosticData) -> Advice:
    """For a posterior that is too narrow: temperature 1, or a method with a wider posterior."""
    if has(case.base.method, "temperature") and case.base.method.temperature != 1:
        code = refit(case, written(case, temperature=1.0))
        return coded("temperature 1", code)
    return another(case, "laplace", "hmc")


def smaller_steps(case: DiagnosticData) -> Advice:
    """For a sampler whose trajectories diverge."""
    method = case.base.method
    target = method.settings().get("target_accept")
    if target is None or target >= 0.95:
        return longer(case)
    code = refit(case, written(case, target_accept=0.95))
    return coded("smaller steps (a higher target_accept)", code)


def other_likelihood(case: DiagnosticData, name: str, text: str, outputs: int = 1) -> Advice:
    """Another likelihood, with `outputs` network outputs per element of y. The snippet builds a
    network if the method has none."""
    chosen = f'"{name}"'
    if _learns_tasks(case):  # the method already predicts the noise of every point
        return Advice("more tasks, or another method for tasks")
    if outputs == 1 and _has_network(case):
        return coded(text, refit(case, likelihood=chosen))
    shape, given = case.posterior.inputs, case.posterior.base_likelihood
    flat = isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], int)
    if not flat or isinstance(given, Heads):
        return Advice(f"{text}, likelihood={name!r}")
    made: Any = None if case.base.model is None else case.base.model.builder
    hidden = tuple(made[1]["hidden"]) if made and made[0] == "mlp" else (50,)
    wide = outputs * max(1, case.few.y[:1].numel())
    method = written(case) if _has_network(case) else '"deep-ensemble"'
    again = call("posterior = doxa.fit", ["net", "data", method, *_options(case, chosen)])
    return coded(text, f"net = doxa.nets.mlp({shape[0]}, {wide}, {hidden!r})\n{again}")


def learned_noise(case: DiagnosticData) -> Advice | None:
    """Learn the noise if it was fixed; recalibrate if it was already learned."""
    likelihood = case.posterior.base_likelihood
    if likelihood.integrates_normal and not likelihood.learns_noise:
        return other_likelihood(case, "gaussian", "let the noise be learned")
    return recalibrate(case.posterior)


def noise_by_input(case: DiagnosticData) -> Advice:
    """A network with a second output for the noise."""
    text = "let the network predict its noise: twice as many outputs"
    return other_likelihood(case, "heteroscedastic", text, outputs=2)


def refit(
    case: DiagnosticData, method: str | None = None, *, network: bool = True, **changes: Any
) -> str:
    """The call of `fit` that made the posterior, with changes, as far as it is recorded."""
    network = network and _has_network(case)
    given = ["net" if network else "None", "data", method or written(case)]
    return call("posterior = doxa.fit", [*given, *_options(case, network=network, **changes)])


def _options(
    case: DiagnosticData, likelihood: str | None = None, network: bool = True, **changes: Any
) -> list[str]:
    posterior, model = case.posterior, case.base.model
    options = {}
    if not _learns_tasks(case):
        options["likelihood"] = likelihood or _likelihood(posterior.fitted_likelihood)
    chosen = model is not None and not model.default_prior and model.prior != Normal(1.0)
    if network and chosen:
        options["prior"] = "posterior.model.prior"
    if posterior.scales.x_loc is not None or posterior.scales.y_loc is not None:
        options["standardize"] = "True"
    options |= {name: str(value) for name, value in changes.items()}
    return [f"{name}={value}" for name, value in options.items()]


def written(case: DiagnosticData, **changes: Any) -> str:
    """The method as Python: its name, or its class with the options that are not the defaults."""
    method: Any = case.base.method
    row = next((row for row in methods() if row.name == method.name), None)
    if row is None or not dataclasses.is_dataclass(method):
        return "posterior.method"
    known = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.init}
    plain: Any = get_method(row.name)()
    set_ = {n: v for n, v in known.items() if not _same(v, getattr(plain, n))} | changes
    if not set_:
        return f'"{row.name}"'
    if not all(isinstance(value, _LITERAL) for value in set_.values()):
        return "posterior.method"
    return f"doxa.{row.class_name}({', '.join(f'{n}={v!r}' for n, v in set_.items())})"


def call(function: str, arguments: list[str]) -> str:
    """On one line if it fits, else with the arguments on separate lines."""
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= WIDTH:
        return line
    inside = textwrap.fill(
        f"{', '.join(arguments)},", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return f"{function}(\n{inside}\n)"


def _has_network(case: DiagnosticData) -> bool:
    return bool(case.base.method.needs_network)


def _learns_tasks(case: DiagnosticData) -> bool:
    """Whether the method is a neural process: it has its own likelihood, and its data are tasks."""
    name = case.base.method.name
    return any(row.name == name and row.tasks == ("tasks",) for row in methods())


def has(method: Any, name: str) -> bool:
    return isinstance(method.settings().get(name), (int, float))


def _likelihood(likelihood: Any) -> str:
    """Its name if all its options are the defaults, else the object itself."""
    try:
        plain = type(likelihood)()
    except TypeError:  # heads, or one that needs settings
        return "posterior.fitted_likelihood"
    return f'"{likelihood.name}"' if likelihood == plain else "posterior.fitted_likelihood"


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, _LITERAL) and isinstance(other, _LITERAL) and value == other
