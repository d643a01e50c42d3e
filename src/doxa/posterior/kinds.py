"""Kinds of posterior, by the names under which they are saved."""

from __future__ import annotations

from doxa.errors import StoreError
from doxa.posterior.base import Posterior

REGISTRY: dict[str, type[Posterior]] = {}


def register_posterior(cls: type[Posterior]) -> type[Posterior]:
    """Make a kind loadable by name."""
    REGISTRY[cls.kind] = cls
    return cls


def posterior_class(kind: str) -> type[Posterior]:
    if kind not in REGISTRY:
        import doxa.registry

        doxa.registry.import_all()
    if kind not in REGISTRY:
        raise StoreError(f"unknown kind of posterior {kind!r}; known: {sorted(REGISTRY)}")
    return REGISTRY[kind]
