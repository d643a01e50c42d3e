"""The most memory that this process has had resident."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def most_memory() -> int:
    """In bytes. `ru_maxrss` of a process also counts the memory of the process that started it, so
    the kernel's own record of this one is read where there is one."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found:
            return 1024 * int(found[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
