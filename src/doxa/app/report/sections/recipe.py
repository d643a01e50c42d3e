"""How to get the same posterior again: the command, the Python lines, seed and versions."""

from __future__ import annotations

import shlex
from typing import Any

from doxa.app.report.describe import settings
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.page import Section
from doxa.app.report.subject import Subject

PLAN = ("net", "members", "epochs", "steps", "lr", "batch_size", "validation", "device")
HELD_OUT = ("test", "split", "calibrate", "conformal", "conformal_kind", "calibration_share")


def recipe(subject: Subject) -> Section:
    posterior = subject.posterior
    versions = posterior.metadata.get("versions", {})
    source = posterior.metadata.get("source", {})
    parts: list[Content] = []
    line = command(subject)
    if line is not None:
        parts += [tag("h3", None, "Command line"), _code("the command that fitted it", line)]
    parts += [tag("h3", None, "Python"), _code("Python that fits it", snippet(subject))]
    said = f"Seed {posterior.record.seed}. "
    said += "Same seed, machine and engine give the same numbers bit for bit; elsewhere they agree "
    said += "up to rounding, which long training amplifies."
    parts.append(tag("p", None, said))
    if versions:
        each = ", ".join(f"{name} {version}" for name, version in versions.items())
        parts.append(tag("p", None, f"Fitted with {each}."))
    if source.get("sha256"):
        parts.append(tag("p", None, "Training file ", subject.names.show(source.get("file", "")),
                         ", SHA-256 ", tag("code", None, source["sha256"]), "."))  # fmt: skip
    return Section("recipe", "Recipe", parts)


def command(subject: Subject) -> str | None:
    """The `doxa fit` line; None for a posterior that did not come from it."""
    metadata, schema = subject.posterior.metadata, subject.schema
    if schema is None or "method" not in metadata:
        return None
    asked = metadata.get("asked", {})
    source = metadata.get("source", {})
    words = ["doxa", "fit", source.get("file") or "DATA.csv", "--target", schema.target]
    words += ["--method", metadata["method"]]
    likelihood = asked.get("likelihood") if "likelihood" in asked else schema.likelihood
    words += ["--likelihood", likelihood] if likelihood else []
    index = asked.get("index") if "index" in asked else schema.index
    words += ["--index", index] if index else []
    for option in ("drop", "categorical", "numeric"):
        for name in asked.get(option, ()):
            words += [f"--{option}", name]
    words += ["--missing", schema.missing] if schema.missing != "error" else []
    for option in ("sep", "decimal", "encoding"):
        words += [f"--{option}", asked[option]] if asked.get(option) else []
    for setting in _settings(subject.posterior.method):
        words += ["--set", setting]
    if asked.get("hidden") and not asked.get("net") and subject.posterior.model is not None:
        words += ["--hidden", ",".join(map(str, asked["hidden"]))]
    for option in (*PLAN, *HELD_OUT):
        if asked.get(option) is not None:
            words += [f"--{option.replace('_', '-')}", str(asked[option])]
    words += ["--seed", str(subject.posterior.record.seed)]
    words += ["--out", subject.place or "run"]
    return " ".join(shlex.quote(str(word)) for word in words)


def snippet(subject: Subject) -> str:
    """Python lines; what they cannot know is a comment."""
    posterior, schema = subject.posterior, subject.schema
    asked = posterior.metadata.get("asked", {})
    lines = ["import doxa"]
    if schema is not None:
        file = posterior.metadata.get("source", {}).get("file") or "DATA.csv"
        options = [f"likelihood={schema.likelihood!r}"]
        lists = ("drop", "categorical", "numeric")
        options += [f"{o}={tuple(asked[o])!r}" for o in lists if asked.get(o)]
        options += [f"index={schema.index!r}"] if schema.index else []
        options += [f"missing={schema.missing!r}"] if schema.missing != "error" else []
        given = {o: asked[o] for o in ("sep", "decimal", "encoding") if asked.get(o)}
        written = ", ".join(f"{name}={value!r}" for name, value in given.items())
        options += [f"dialect=intake.Dialect({written})"] if written else []
        lines += [
            "from pathlib import Path",
            "from doxa.app import intake", "",
            f"asked = intake.Asked({schema.target!r}, {', '.join(options)})",
            f"frame, columns = intake.take_in(Path({file!r}), asked)",
            "x, y = columns.features(frame)[0], columns.targets(frame)",
        ]  # fmt: skip
    else:
        lines += ["", "x, y = ...  # the training rows"]
    lines += [f"net = {_net(posterior)}"]
    model = posterior.model
    extra = [f"seed={posterior.record.seed}"]
    if posterior.scales.x_loc is not None or posterior.scales.y_loc is not None:
        extra.append("standardize=True")
    given = {name: asked[name] for name in PLAN if asked.get(name) is not None}
    if not given.get("validation"):  # 0 is the command's word for none
        given.pop("validation", None)
    extra += [f"{name}={value!r}" for name, value in given.items() if name != "net"]
    if "members" not in asked and posterior.members > 1 and posterior.kind != "mixture":
        extra.append(f"members={posterior.members}")
    meant = posterior.fitted_likelihood
    nobody_asked = getattr(meant, "assumed", False)
    beliefs = [f"likelihood={'doxa.Gaussian(assumed=True)' if nobody_asked else _class(meant)}"]
    if model is not None and model.prior is not None and not asked:
        beliefs.append(f"prior={_class(model.prior)}")
    lines += [
        f"method = {_class(posterior.method)}",
        "posterior = doxa.fit(",
        "    net, (x, y), method,",
        f"    {', '.join(beliefs + extra)},",
        ")",
    ]
    if getattr(posterior, "transform", None) is not None:
        lines.append(f"# then recalibrated: {type(posterior.transform).__name__}")
    return "\n".join(lines)


def _net(posterior: Any) -> str:
    model = posterior.model
    if model is None:
        return "None  # the method brings its own functions"
    builder = getattr(model, "builder", None)
    if builder is None:
        return f"...  # your own {type(model.net).__name__}"
    name, options = builder
    return f"doxa.nets.build({name!r}, {options!r})"


def _class(value: Any) -> str:
    """A public class of doxa with the settings that are not defaults."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_class(v)}" for k, v in value.items()) + "}"
    changed = [f"{name}={each!r}" for name, each, same in settings(value) if not same]
    return f"doxa.{type(value).__name__}({', '.join(changed)})"


def _settings(method: Any) -> list[str]:
    return [
        f"{name}={value!r}".replace("'", "") for name, value, same in settings(method) if not same
    ]


def _code(label: str, text: str) -> Html:
    box = {"tabindex": 0, "role": "region", "aria-label": label}
    return tag("pre", box, tag("code", None, text))
