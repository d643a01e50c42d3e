"""What to try: words for people, and Python that runs as it is printed.

In the code `net` and `data` are what was given to `fit`, `posterior` is what came back, and
`held_out` are rows (x, y) that neither has seen. A piece of advice is made for the posterior at
hand: its method, its likelihood, what it already does.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from doxa.diagnose.data import DiagnosticData
from doxa.likelihoods import Gaussian, Heads
from doxa.posterior import Posterior
from doxa.priors import Normal
from doxa.registry import get_method, methods

NAMES = (
    "net and data as given to fit, posterior as it came back, held_out rows (x, y) that neither "
    "has seen"
)
WIDTH = 79  # of a line of code
_INDENT = "    "
_LITERAL = (str, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True)
class Advice:
    """Words, and snippets of Python in the same order, each under a comment that says which of the
    words it is; some advice has none."""

    words: str
    code: tuple[str, ...] = ()


def coded(words: str, code: str) -> Advice:
    return Advice(words, (f"# {words}\n{code}",))


def any_of(*each: Advice | str | None) -> Advice:
    """Several things to try, the first one first."""
    given = [Advice(one) if isinstance(one, str) else one for one in each if one]
    return Advice("; or ".join(a.words for a in given), tuple(s for a in given for s in a.code))


MORE_ROWS = Advice("more rows")
NEW_ROWS = coded(
    "ask again with rows that the fit has not seen",
    "doxa.diagnose.doctor(posterior, data, held_out)",
)


def standardise(patient: DiagnosticData) -> Advice | None:
    """None where it is done already."""
    scales = patient.posterior.scales
    if scales.x_loc is not None or scales.y_loc is not None:
        return None
    return coded("standardise x and y", refit(patient, standardize=True))


def calmer(patient: DiagnosticData) -> Advice:
    """For a fit that ran away: unit scales and a tenth of the rate, at once."""
    changes: dict[str, Any] = {}
    words = []
    if standardise(patient) is not None:
        changes["standardize"] = True
        words.append("standardise x and y")
    method = patient.base.method
    if getattr(method, "uses_rate", False):
        asked = patient.posterior.metadata.get("asked", {}).get("lr")
        changes["lr"] = float(f"{(asked or method.default_rate) / 10:.3g}")
        words.append("a tenth of the learning rate")
    if not words:
        return longer(patient)
    return coded(" and ".join(words), refit(patient, **changes))


def longer(patient: DiagnosticData) -> Advice:
    """More draws of a chain, more steps of anything else."""
    method = patient.base.method
    lengths = {n: 2 * max(50, getattr(method, n)) for n in ("burn_in", "draws") if has(method, n)}
    if lengths:
        code = refit(patient, written(patient, **lengths))
        told = "twice the burn-in and the draws" if len(lengths) == 2 else "twice the draws"
        return coded(told, code)
    steps = int(patient.posterior.diagnostics.get("steps") or 0)
    if not steps:  # computed in one pass
        return another(patient, "map", "deep-ensemble", "gp", "linear")
    return coded("more steps", refit(patient, steps=2 * steps))


def early_stopping(patient: DiagnosticData) -> Advice | None:
    """None where the fit stopped on held-out rows, or the method has nothing to stop."""
    method = patient.base.method
    if patient.posterior.history.get("validation") or not getattr(method, "overfits", False):
        return None
    return coded("stop early, on rows held out", refit(patient, validation=0.1))


def narrower_prior(patient: DiagnosticData) -> Advice | None:
    if not _has_network(patient):
        return None
    return coded("a narrower prior", refit(patient, prior="doxa.Normal(0.5)"))


def recalibrate(posterior: Posterior) -> Advice | None:
    """By the kind that is for such targets; None for several heads."""
    likelihood = posterior.base_likelihood
    if isinstance(likelihood, Heads):
        return None
    if likelihood.discrete and not likelihood.classifies:
        code = call("posterior = doxa.evaluate.conformal", ["posterior", "held_out", "0.9"])
        return coded("conformal intervals, on rows of their own", code)
    kind = '"temperature"' if likelihood.classifies else '"quantile"'
    code = call("posterior = doxa.evaluate.recalibrate", ["posterior", "held_out", kind])
    return coded("recalibrate, on rows of their own", code)


def ensemble(patient: DiagnosticData) -> Advice | None:
    """An ensemble, or more members where it is one."""
    if not _has_network(patient):
        return None
    if getattr(patient.base.method, "name", "") == "deep-ensemble":
        return coded("more members", refit(patient, members=2 * patient.base.members))
    return coded("an ensemble", refit(patient, '"deep-ensemble"'))


def another(patient: DiagnosticData, *names: str) -> Advice:
    """The first of these methods that is for the task and is not the one at hand."""
    likelihood = patient.posterior.base_likelihood
    task = "classification" if likelihood.classifies else "regression"
    task = "tasks" if _learns_tasks(patient) else task
    own = getattr(patient.base.method, "name", "")
    for name in names:
        row = methods()[name]
        without = row.family in ("exact", "process")  # of a network, and for Gaussian noise only
        fits = likelihood.is_normal if without else _has_network(patient)
        if name != own and task in row.tasks and fits:
            return coded(f"{name!r}", refit(patient, f'"{name}"', network=not without))
    return Advice("another method")


def colder(patient: DiagnosticData) -> Advice:
    """For a posterior that is too narrow: its own temperature, or a method that spreads."""
    if has(patient.base.method, "temperature") and patient.base.method.temperature != 1:
        code = refit(patient, written(patient, temperature=1.0))
        return coded("temperature 1", code)
    return another(patient, "laplace", "hmc")


def smaller_steps(patient: DiagnosticData) -> Advice:
    """Of a sampler whose trajectories break off."""
    method = patient.base.method
    target = getattr(method, "target_accept", None)
    if target is None or target >= 0.95:
        return longer(patient)
    code = refit(patient, written(patient, target_accept=0.95))
    return coded("smaller steps (a higher target_accept)", code)


def other_likelihood(patient: DiagnosticData, name: str, words: str, outputs: int = 1) -> Advice:
    """With `outputs` numbers of the network for one of y; a network is made where there is none."""
    chosen = f'"{name}"'
    if _learns_tasks(patient):  # it predicts the noise of every point already
        return Advice("more tasks, or another method for tasks")
    if outputs == 1 and _has_network(patient):
        return coded(words, refit(patient, likelihood=chosen))
    shape, given = patient.posterior.inputs, patient.posterior.base_likelihood
    flat = isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], int)
    if not flat or isinstance(given, Heads):
        return Advice(f"{words}, likelihood={name!r}")
    made: Any = getattr(patient.base.model, "builder", None)
    hidden = tuple(made[1]["hidden"]) if made and made[0] == "mlp" else (50,)
    wide = outputs * max(1, patient.few.y[:1].numel())
    method = written(patient) if _has_network(patient) else '"deep-ensemble"'
    again = call("posterior = doxa.fit", ["net", "data", method, *_options(patient, chosen)])
    return coded(words, f"net = doxa.nets.mlp({shape[0]}, {wide}, {hidden!r})\n{again}")


def learned_noise(patient: DiagnosticData) -> Advice | None:
    """Where the noise was given; where it is learned already, a correction of its size."""
    likelihood = patient.posterior.base_likelihood
    if isinstance(likelihood, Gaussian) and likelihood.noise is not None:
        return other_likelihood(patient, "gaussian", "let the noise be learned")
    return recalibrate(patient.posterior)


def noise_by_input(patient: DiagnosticData) -> Advice:
    """A network with a second output for the noise."""
    words = "let the network predict its noise: twice as many outputs"
    return other_likelihood(patient, "heteroscedastic", words, outputs=2)


def refit(
    patient: DiagnosticData, method: str | None = None, *, network: bool = True, **changes: Any
) -> str:
    """The call of `fit` that made the posterior, with changes: as much of it as is known."""
    network = network and _has_network(patient)
    given = ["net" if network else "None", "data", method or written(patient)]
    return call("posterior = doxa.fit", [*given, *_options(patient, network=network, **changes)])


def _options(
    patient: DiagnosticData, likelihood: str | None = None, network: bool = True, **changes: Any
) -> list[str]:
    posterior, model = patient.posterior, patient.base.model
    options = {}
    if not _learns_tasks(patient):
        options["likelihood"] = likelihood or _likelihood(posterior.fitted_likelihood)
    chosen = model is not None and not model.default_prior and model.prior != Normal(1.0)
    if network and chosen:
        options["prior"] = "posterior.model.prior"
    if posterior.scales.x_loc is not None or posterior.scales.y_loc is not None:
        options["standardize"] = "True"
    options |= {name: str(value) for name, value in changes.items()}
    return [f"{name}={value}" for name, value in options.items()]


def written(patient: DiagnosticData, **changes: Any) -> str:
    """The method as a person would write it: its name, or its class with what was changed."""
    method: Any = patient.base.method
    row = next((row for row in methods() if row.name == getattr(method, "name", None)), None)
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
    """On one line where it fits, else with the arguments on lines of their own."""
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= WIDTH:
        return line
    inside = textwrap.fill(
        f"{', '.join(arguments)},", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return f"{function}(\n{inside}\n)"


def _has_network(patient: DiagnosticData) -> bool:
    return bool(getattr(patient.base.method, "needs_network", True))


def _learns_tasks(patient: DiagnosticData) -> bool:
    """A neural process: its likelihood is its own, and its data are tasks."""
    name = getattr(patient.base.method, "name", None)
    return any(row.name == name and row.tasks == ("tasks",) for row in methods())


def has(method: Any, name: str) -> bool:
    return isinstance(getattr(method, name, None), (int, float))


def _likelihood(likelihood: Any) -> str:
    """Its name where nothing in it was chosen, else the object itself."""
    try:
        plain = type(likelihood)()
    except TypeError:  # heads, or one that needs settings
        return "posterior.fitted_likelihood"
    return f'"{likelihood.name}"' if likelihood == plain else "posterior.fitted_likelihood"


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, _LITERAL) and isinstance(other, _LITERAL) and value == other
