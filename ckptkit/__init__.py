"""Convert and validate LLM checkpoints: planned, streamed, all or nothing. Importing this imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .files.checkpoint import open_checkpoint
    from .plan import Plan

__version__ = "0.1.0"
__all__ = ["Plan", "__version__", "open_checkpoint"]

_HOMES = {"open_checkpoint": "files.checkpoint", "Plan": "plan"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
