"""What each way of arranging gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import Finding
from ...layout_config import Facts
from ...plan import Step


class Rearranged(NamedTuple):
    """Steps by the tensor they replace, the layout there was and the one made, what to note, what is in the way.

    The layout ``codes`` is called by what held them before too: ``codes of dsv4``.
    """

    steps: Mapping[str, Sequence[Step]]
    origin: str
    made: str
    facts: Facts
    problems: Sequence[Finding] = ()
