"""The parts of a plan as tasks on a Ray cluster.

A task is told where the plan's file, the source and OUT are, and which part to make; it opens them itself, on a file
system that all nodes see. No tensor passes through Ray. A node that is lost takes its tasks with it; Ray starts them
again elsewhere, and each carries on with what its part's journal says is finished.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import plan_file
from ..errors import Finding, UserError, fail
from ..replay import derived, source_of
from ..scheduling import Part
from .options import Options
from .parts import execute_part

_RETRIES = 8
_PATIENCE = 60.0  # seconds that a task waits for a part that another process still holds: one on a lost node, say


class Silent:
    """Progress that nobody hears."""

    def start(self, total_shards: int, total_bytes: int) -> None: ...

    def shard(self, name: str) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def done(self) -> None: ...


def run_part(path: str, source: str | None, out: str, part: Part, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make a part of the plan in the file ``path``: what a task does. Gives what was wrong, as findings' fields."""
    try:
        file = plan_file.read(path)
        with source_of(file, source) as opened, derived(file, opened) as (_, plan):
            lines = Path(path).read_text("utf-8").splitlines()
            given = Options(**options, nonfinite_error=plan.settings.get("nonfinite") != "keep")
            _patiently(lambda: execute_part(plan, lines, opened, Path(out), part, given, Silent()))
    except UserError as error:
        return [finding.as_dict() for finding in error.findings]
    return []


def _patiently(make: Callable[[], object]) -> None:
    """Make it, and again for a while where another process holds it."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            make()
            return
        except UserError as error:
            if time.monotonic() > until or {finding.id for finding in error.findings} != {"output.locked"}:
                raise
            time.sleep(1)


def _reach(address: str) -> None:
    """Ray itself asks for minutes where nobody answers. Raises UserError ``engine.ray``."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise fail("engine.ray", f"no Ray cluster at {address}: {error}", hint="--address HOST:PORT") from None


def _fit(processors: int, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Ray would wait without end for a node that is large enough. Raises UserError ``engine.ray``."""
    largest = max((int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]), default=0)
    if 0 < largest < processors:  # with no processor at all, nodes are still to come
        message = f"--jobs {processors}: the largest node of the Ray cluster has {largest} processors"
        raise fail("engine.ray", message, hint=f"--jobs {largest}")


def run_parts(
    path: Path, source: str | None, out: Path, parts: Iterable[Part], options: Mapping[str, Any], address: str | None,
    told: Callable[[Part], None],
) -> None:  # fmt: skip
    """Make ``parts`` on the cluster at ``address``, or the one that this machine is of; ``told`` of each that is made.

    Raises UserError: what tasks found wrong, ``engine.ray`` where Ray is not there or gives up.
    """
    try:
        import ray
    except ImportError:
        raise fail("engine.ray", "Ray is not installed here", hint="pip install 'ckptkit[ray]'") from None
    if address not in {None, "auto"}:
        _reach(address)
    try:
        ray.init(address=address or "auto", log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        message = f"no Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0]}"
        raise fail("engine.ray", message, hint="ray start --head, or --address HOST:PORT") from None
    try:
        processors = max(1, options.get("jobs") or 1)
        _fit(processors, ray.nodes())  # type: ignore[no-untyped-call]
        task = ray.remote(num_cpus=processors, max_retries=_RETRIES)(run_part)
        waiting = {task.remote(str(path), source, str(out), part, dict(options)): part for part in parts}
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting))
            found = ray.get(ready)
            if found:
                raise UserError(Finding(**finding) for finding in found)
            told(waiting.pop(ready))
    except ray.exceptions.RayError as error:
        raise fail("engine.ray", f"Ray gave up: {str(error).splitlines()[0]}", hint="the same command again") from None
    finally:
        ray.shutdown()
