"""A plan file and its source, opened together: the plan is derived anew from the source's headers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from . import plan_file
from .errors import UserError
from .files.checkpoint import Checkpoint, joined
from .files.mending import open_mended
from .files.source import Source, open_source
from .files.torch_file import open_draft
from .plan import Plan


def source_of(file: plan_file.PlanFile, named: str | None) -> Source:
    """The source as it was ``named``, or where the plan found it. Raises UserError."""
    try:
        return open_source(named or file.header["source"])
    except UserError as error:
        if named:
            raise
        hint = "--source SRC says where the source lies now"
        raise UserError(replace(finding, hint=hint) for finding in error.findings) from None


@contextmanager
def derived(file: plan_file.PlanFile, source: Source) -> Iterator[tuple[Checkpoint, Plan]]:
    """The checkpoint in ``source``, those beside it, and the plan. Raises UserError where they are not what they were."""
    with ExitStack() as stack:
        checkpoint = (open_mended if file.header["command"] == "reshard" else open_draft)(source)
        others = file.header.get("others", {})
        if others:
            opened = {key: stack.enter_context(open_source(path)) for key, path in others.items()}
            checkpoint = joined(checkpoint, {key: open_draft(other) for key, other in opened.items()})
        yield checkpoint, plan_file.derive(file, checkpoint)
