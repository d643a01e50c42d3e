"""What a sampler will cost, said before it starts.

A gradient of all chains on all rows takes about

    seconds = 6·10⁻⁴ + chains × 6 × parameters × rows / 10¹⁰

of one core (measured: small networks pay for launching, larger ones for arithmetic; so small a
network is fitted on one thread, however many torch is set to).
"""

from __future__ import annotations

from doxa.method import Method


def gradient_seconds(gradients: int, chains: int, parameters: int, rows: int) -> float:
    """About how long so many gradients of all chains take on one core."""
    return gradients * (6e-4 + 6.0 * chains * parameters * rows / 1e10)


def cost_words(method: Method, members: int | None, parameters: int, rows: int) -> str:
    """What a person should know before waiting for it; "" for a method whose length is known from
    its steps."""
    if method.gradients is None:
        return ""
    least, most = method.gradients
    chains = members or method.default_members
    short, long = (span(gradient_seconds(n, chains, parameters, rows)) for n in method.gradients)
    who = f"{chains} chains" if chains > 1 else "one chain"
    if least == most:
        return (
            f"{method.name}: {most:,} gradients of {who} on all {rows:,} rows, about {long} of one "
            "core"
        )
    return (
        f"{method.name}: {least:,} to {most:,} gradients of {who} on all {rows:,} rows, as long as "
        f"trajectories turn out to be: between {short} and, at most, {long} of one core"
    )


def span(seconds: float) -> str:
    """A length of time as people say it."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "1 s"
