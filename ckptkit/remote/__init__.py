"""Sources on a server: Hub repositories, object stores. Headers and tensors are read by ranges, nothing is downloaded
before it is needed.

Imported when such a source is named, so that local work never pays for it.
"""

from __future__ import annotations

from ..errors import fail
from ..files.source import Source


def open_remote(text: str) -> Source:
    """The source that ``org/name[@revision]``, ``hf://org/name[@revision][/folder or file]`` or another URL names.

    The address of a repository's page on the Hub is its name, too.

    Raises UserError: ``access.*`` where it may not be read or cannot be reached, ``source.missing``,
    ``source.revision``, ``usage.source`` for a name that is none.
    """
    scheme, separator, _ = text.partition("://")
    if not separator or scheme.lower() == "hf":
        from .hub import open_hub

        return open_hub(text if separator else f"hf://{text}")
    if scheme.lower() in {"http", "https"}:
        from .hub import is_of_hub, open_hub

        if is_of_hub(text):
            return open_hub(text)
    if scheme.lower() == "file":
        message = f"{text} is a local path written as a URL"
        raise fail("usage.source", message, hint=f"give the path: {text.partition('://')[2]}")
    from .objects import open_objects

    return open_objects(text)
