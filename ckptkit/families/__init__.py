"""What is known of model families: which tensor is what, what is tied, what engines fuse, how experts are stacked.

Tables and pure functions on names, shapes and a parsed ``config.json``: no I/O, no torch. A *tensor name* is the name
in the checkpoint (``model.layers.0.mlp.up_proj.weight``), a *module* that name without ``.weight``. Names are those
of checkpoints as published, which differ from the module names that a library gives them after loading.
"""

from __future__ import annotations

from .config import config_value, declared_drafts
from .experts import Columns, Piece, expert_projections, is_expert_tensor
from .fused import experts_of, fused_set, shares_global_scale
from .kinds import LINEAR_LIKE, Kind, classifier, classify, draft_part, is_transposed, module_of
from .ties import TIED_BY_DEFAULT, embedding_of, head_of, is_tied, tie_locations

__all__ = [
    "LINEAR_LIKE",
    "TIED_BY_DEFAULT",
    "Columns",
    "Kind",
    "Piece",
    "classifier",
    "classify",
    "config_value",
    "declared_drafts",
    "draft_part",
    "embedding_of",
    "expert_projections",
    "experts_of",
    "fused_set",
    "head_of",
    "is_expert_tensor",
    "is_tied",
    "is_transposed",
    "module_of",
    "shares_global_scale",
    "tie_locations",
]
