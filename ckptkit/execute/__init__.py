"""Plan -> staging folder -> OUT: read, make, write, hash, journal, resume, publish.

The plan says what is made; nothing here knows a number format, a recipe or a command. Memory does not grow with the
size of a shard or a tensor. The source is only read.
"""

from __future__ import annotations

from .options import Options, Progress, Result
from .refusals import preflight
from .run import execute
from .sizes import Space, peak_memory, space

__all__ = ["Options", "Progress", "Result", "Space", "execute", "peak_memory", "preflight", "space"]
