"""The loop: members and runs, progress made, kept draws, interrupts, the finish."""

from doxa.driver.loop import Callback, Driver, Options

__all__ = ["Callback", "Driver", "Options"]
