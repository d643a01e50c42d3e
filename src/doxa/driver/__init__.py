"""The training loop: data and runs before it, steps and checkpoints in it, validation after it."""

from doxa.driver.loop import Driver

__all__ = ["Driver"]
