"""Execution: forward passes of all members, and steps that are eager, recorded, compiled or
captured."""

from doxa.engine.engine import MODES, Engine, choose, tiles, works

__all__ = ["MODES", "Engine", "choose", "tiles", "works"]
