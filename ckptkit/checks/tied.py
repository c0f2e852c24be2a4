"""A head that is tied to the embedding, and stored all the same: are they the same bytes?"""

from __future__ import annotations

from ..errors import Finding
from ..families import is_tied
from ..files.checkpoint import CONFIG
from ..files.source import same_bytes
from . import Level, Page, Probe, Seen, Subject
from .config import tied_pair

ID = "data.tie"


def _bytes(subject: Subject) -> Seen:
    """Other dtypes and shapes show in the headers: they are config.tie's."""
    embedding, _, head = tied_pair(subject)
    if embedding is None or head is None or not is_tied(subject.config):
        return Seen((), 0)
    here, there = head.weight.first, embedding.weight.first
    if (here.dtype, here.shape) != (there.dtype, there.shape) or not subject.sample.holds(here.name):
        return Seen((), 0)
    if same_bytes(subject.checkpoint.source, here, there):
        return Seen((), 1)
    message = f"{CONFIG} ties {head.name} to {embedding.name}, yet the stored {here.name} holds other numbers"
    return Seen([Finding(ID, message, file=here.file, tensor=here.name, data={"embedding": there.name})], 1)


def _unfit(subject: Subject) -> str | None:
    return subject.unknown


PROBES = (Probe((ID,), Level.DATA, _bytes, _unfit),)

PAGES = (
    Page(
        ID,
        Level.DATA,
        "error",
        "A tied head is stored, and is not the embedding",
        "config.json says that the output head is the token embedding, and a head with other numbers is stored beside "
        "it. Engines that follow the config leave it out, others load it: they compute different things from the same "
        "files, without a word. Usually a head was trained or merged after it had been untied, and the config kept the "
        "tie.",
        '"tie_word_embeddings": true beside an lm_head.weight that differs from model.embed_tokens.weight',
        '"tie_word_embeddings": false in config.json, at the top level and in text_config, where the stored head is '
        "meant; ckptkit reshard SRC OUT --drop lm_head.weight where it is not.",
    ),
)
