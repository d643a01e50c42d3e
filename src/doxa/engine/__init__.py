"""Execution: forward passes of all members, and steps that are eager, recorded, compiled or
captured."""

from doxa.engine.engine import MODES, Engine, choose_engine, fall_back_to_loop, tiles

__all__ = ["MODES", "Engine", "choose_engine", "fall_back_to_loop", "tiles"]
