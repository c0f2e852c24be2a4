"""Plan -> staging folder -> OUT: read, make, write, hash, journal, resume, publish.

The plan says what is made; nothing here knows a number format, a recipe or a command. Memory does not grow with the
size of a shard or a tensor. The source is only read.
"""

from __future__ import annotations

from .fetching import fetched, to_fetch
from .footprint import peak_memory
from .options import Options, Progress, Result
from .refusals import not_linked, preflight
from .run import execute
from .sizes import Space, copied, space

__all__ = [
    "Options",
    "Progress",
    "Result",
    "Space",
    "copied",
    "execute",
    "fetched",
    "not_linked",
    "peak_memory",
    "preflight",
    "space",
    "to_fetch",
]
