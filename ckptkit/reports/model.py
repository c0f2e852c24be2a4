"""The parts of a report, as pydantic models: what stands in its JSON. Fields are only ever added."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from .. import __version__
from ..console import finding_text, fmt_count
from ..errors import Finding


class Record(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(frozen=True)


class Tool(Record):
    """What made the report."""

    name: str = "ckptkit"
    version: str = __version__


class Place(Record):
    """A checkpoint: where it lies, the Hub's commit if known, the sha256 of its ckptkit.json if it has one."""

    uri: str
    revision: str | None = None
    manifest_sha256: str | None = None


class Check(Record):
    """How one check came out. ``findings`` counts all of its findings, also where ``truncated`` says some are left out."""

    id: str
    level: Literal["static", "data", "numeric", "serve"]
    result: Literal["ok", "warn", "fail", "skip"]
    checked: int = Field(description="How many things were looked at.")
    findings: int
    truncated: bool = False
    seconds: float = Field(description="Time of the probe; checks that one probe answers share it.")
    reason: str | None = Field(default=None, description="Why the check was skipped.")


class Problem(Record):
    """A finding. ``allowed``: its id was named by ``--allow``, so an error counts as a warning."""

    id: str
    severity: Literal["error", "warning"]
    file: str | None
    tensor: str | None
    message: str
    hint: str | None
    data: dict[str, JsonValue]
    allowed: bool = False

    @property
    def text(self) -> str:
        """The finding in one line: file and tensor first, unless the message names them itself."""
        return finding_text(Finding(self.id, self.message, self.file, self.tensor))


class Counts(Record):
    """All findings by severity, and the checks that did not run."""

    errors: int
    warnings: int
    skipped: int


class Totals(Record):
    """What a checkpoint holds. ``parameters`` counts numbers of the model, unpacked and without scales."""

    tensors: int
    parameters: int
    bytes: int
    by_dtype: dict[str, int] = Field(description="Bytes by dtype, in the spelling of safetensors.")


class Segment(Record):
    """Neighbours in a shard that are drawn as one: ``tensors`` of one dtype, ``name`` the first of them."""

    name: str
    dtype: str
    tensors: int
    bytes: int
    faulty: bool = Field(default=False, description="A finding names one of these tensors.")


class ShardBar(Record):
    """A shard as it lies on disk. ``faulty``: a finding names it or one of its tensors."""

    file: str
    bytes: int
    faulty: bool
    segments: list[Segment]


class Stats(Totals):
    """The checkpoint's totals, those of what it was compared with, and its shards or as many as a figure can show."""

    shards: int = 0
    shard_map: list[ShardBar] = []
    against: Totals | None = None


class TensorError(Record):
    """A converted tensor against its source.

    ``rel_rms`` is the RMS of the difference over the RMS of the source, ``max_abs`` the largest difference, ``cos`` the
    cosine of the two, ``bound`` the largest ``rel_rms`` that format and arithmetic allow, ``beyond`` the number of
    elements that are further off than those allow, where that is an error.
    """

    tensor: str
    rel_rms: float | None
    max_abs: float | None
    cos: float | None = None
    bound: float | None = None
    beyond: int = 0

    @property
    def is_wrong(self) -> bool:
        """Whether rounding cannot have made it of its source."""
        return self.rel_rms is None or self.beyond > 0


class Histogram(Record):
    """Counts of tensors between neighbouring ``edges``; ``exact`` of them had no error at all."""

    edges: list[float]
    counts: list[int]
    exact: int = 0
    bounds: list[tuple[float, float]] = Field(
        default=[], description="Where their bounds lie, a range for each cluster."
    )


class LayerError(Record):
    """The worst ``rel_rms`` of a layer's tensors."""

    stack: str
    layer: int
    rel_rms: float | None


class CellError(Record):
    """The worst ``rel_rms`` of one module in one layer, experts taken together.

    ``stack`` is the name before the layer's number; ``layer`` is null for tensors that lie in none.
    """

    stack: str
    layer: int | None
    module: str
    rel_rms: float | None
    tensors: int
    beyond: bool = Field(default=False, description="Some tensor has elements beyond the bound of its format.")


class ExpertErrors(Record):
    """The worst ``rel_rms`` of each expert of a layer, by the expert's number."""

    stack: str
    layer: int
    rel_rms: list[float | None]


class HeadAgreement(Record):
    """How far the logits of a converted head agree with those of its source, for hidden states of one ``kind``.

    Shares of states whose first token, and of their first 5 and 10 tokens, agree; the KL divergence in nats, of the source
    from the result and the reverse; the mean and the largest difference of a logit; how often the first token ``flips``, and how often ``beyond`` rounding.
    """

    tensor: str
    kind: str
    states: int
    top1: float | None
    top5: float | None
    top10: float | None
    kl: float | None
    kl_reverse: float | None = None
    mean_abs: float | None
    max_abs: float | None
    flips: int
    beyond: int


class Numeric(Record):
    """The comparison with the source, in the figures that tell where it went wrong."""

    metric: str = "rel_rms"
    tensors: int
    median: float | None
    worst: list[TensorError]
    histogram: Histogram | None = None
    per_layer: list[LayerError] = []
    cells: list[CellError] = []
    experts: list[ExpertErrors] = []


class Report(Record):
    """The result of one run over one checkpoint."""

    model_config = ConfigDict(frozen=True, title="ckptkit report")

    schema_: Literal[1] = Field(default=1, serialization_alias="schema")
    tool: Tool = Tool()
    command: str
    ok: bool
    exit_code: int
    target: Place
    against: Place | None
    level: str
    sample: str | None
    started: datetime
    seconds: float
    counts: Counts
    truncated: bool = Field(default=False, description="Some findings are left out; each check says how many it had.")
    allowed: list[str] = Field(default=[], description="The ids named by --allow.")
    checks: list[Check]
    findings: list[Problem]
    stats: Stats | None
    numeric: Numeric | None
    heads: list[HeadAgreement] = []
    figures: dict[str, JsonValue] = Field(default={}, description="What else the checks measured, by name.")
    environment: dict[str, JsonValue]

    @property
    def verdict(self) -> str:
        """How it went, in a line: ``failed: 2 errors, 1 warning; 3 of 40 checks not run``."""
        counts = self.counts
        found = [fmt_count(counts.errors, "error"), fmt_count(counts.warnings, "warning")]
        not_run = f"; {counts.skipped} of {fmt_count(len(self.checks), 'check')} not run" if counts.skipped else ""
        return f"{'passed' if self.ok else 'failed'}: {', '.join(found)}{not_run}"


def by_level(checks: Iterable[Check]) -> list[tuple[str, list[Check]]]:
    """Checks under their levels, in the order they were run."""
    levels: dict[str, list[Check]] = {}
    for check in checks:
        levels.setdefault(check.level, []).append(check)
    return list(levels.items())
