"""The loop: members and runs, progress made, kept draws, interrupts, the finish."""

from doxa.driver.loop import Driver
from doxa.driver.setup import Callback, Options

__all__ = ["Callback", "Driver", "Options"]
