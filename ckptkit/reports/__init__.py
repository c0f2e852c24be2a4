"""Forms of a report: JUnit XML, GitHub annotations, an HTML page."""

from __future__ import annotations

import re

# What XML 1.0 cannot hold, not even escaped; browsers replace most of it too.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def legal(text: str) -> str:
    r"""``text`` with the characters that neither XML nor HTML can hold spelled out: ``\x00``."""
    return _ILLEGAL.sub(lambda found: ascii(found[0])[1:-1], text)
