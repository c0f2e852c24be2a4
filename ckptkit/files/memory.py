"""Memory: how much of it there is, and how the C library's allocator behaves while arrays are computed with."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep what a tile or a chunk frees for the next one.

    Given back to the system, it comes again page by page, each zeroed: that can take as long as the computation does.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def available() -> int | None:
    """Bytes that can be had without swapping, as Linux tells it, the limit of a container included; None elsewhere."""
    with suppress(OSError):
        told = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
        if told:
            return min([int(told[1]) << 10, *_left_in_group()])
    return None


def _left_in_group() -> list[int]:
    """What a cgroup (version 2) leaves: its limit less what it uses that cannot be dropped; nothing without a limit."""
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit, used = (int((group / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text("ascii"), re.MULTILINE)
        return [limit - used + (int(cached[1]) if cached else 0)]
    return []
