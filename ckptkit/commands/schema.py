"""``ckptkit schema``: JSON Schemas of the documents that the program reads and writes."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import click

from .. import __package__ as package
from ..console import Console
from ..options import command

DOCUMENTS = ("report", "recipe", "plan")


@command
@click.argument("document", type=click.Choice(DOCUMENTS))
def schema(console: Console, document: str) -> None:
    """Print the JSON Schema (2020-12) of a report, of a recipe, or of a line of a plan file.

    \b
    Examples:
      ckptkit schema recipe > recipe.schema.json     # in an editor: completion and errors while typing
      ckptkit schema report > report.schema.json
      ckptkit verify ./model --report report.json; check-jsonschema --schemafile report.schema.json report.json
    """
    found = _schema(document)
    text = json.dumps(found, indent=2)
    console.result({"document": document, "json_schema": found}, [text], quiet=[text])


def _schema(document: str) -> dict[str, Any]:
    """A report's follows from its models, the others are written by hand."""
    if document == "report":
        from ..reports.report import json_schema

        return json_schema()
    found: dict[str, Any] = json.loads((files(package) / "data" / f"{document}.schema.json").read_text("utf-8"))
    return found
