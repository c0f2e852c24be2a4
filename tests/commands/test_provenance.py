"""``hash --statement`` and ``verify --provenance``: what a result is made of, and that it still is what was made."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import in_toto_attestation.predicates.provenance.v1.provenance_pb2 as slsa
import in_toto_attestation.v1.statement_pb2 as in_toto
import pytest
from google.protobuf.json_format import ParseDict
from in_toto_attestation.v1.statement import Statement
from make import checkpoint, llama, llama_config
from told import Told, teller

from ckptkit.errors import FOUND, OUTPUT, SOURCE, USAGE

RECIPE = "w4a16-lm_head-w8a16"


@pytest.fixture
def hashed(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "hash")


@pytest.fixture
def verified(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "verify")


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Two shards, of which only the second one is written anew."""
    head = {"lm_head.weight": llama()["lm_head.weight"]}
    body = {name: tensor for name, tensor in llama().items() if name not in head}
    checkpoint(tmp_path / "model", [body, head], llama_config())
    teller(capsys, "quantize")(tmp_path / "model", tmp_path / "out", "--recipe", "lm_head-w8a16", "--link", "hard")
    return tmp_path / "out"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ids(document: Mapping[str, Any]) -> set[str]:
    return {found["id"] for found in document["findings"] if found["id"].startswith("provenance.")}


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_the_statement_is_one_and_names_every_file(tmp_path: Path, hashed: Told, made: Path) -> None:
    hashed(made, "--statement", tmp_path / "s.json", "--with-source")
    content = read(tmp_path / "s.json")
    Statement.copy_from_pb(ParseDict(content, in_toto.Statement())).validate()
    assert ParseDict(content["predicate"], slsa.Provenance()).build_definition.build_type
    assert {item["name"]: item["digest"]["sha256"] for item in content["subject"]} == {
        path.name: sha256(path) for path in made.iterdir()
    }
    definition = content["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["plan"] == read(made / "ckptkit.json")["plan"]
    named = {item["name"]: item["digest"]["sha256"] for item in definition["resolvedDependencies"] if "uri" not in item}
    model = tmp_path / "model"
    assert named == {path.name: sha256(path) for path in model.glob("*.safetensors")}
    assert str(tmp_path) not in json.dumps(content["subject"])


def test_what_a_link_shows_of_the_source_needs_no_reading(tmp_path: Path, hashed: Told, made: Path) -> None:
    hashed(made, "--statement", tmp_path / "s.json")
    named = read(tmp_path / "s.json")["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [("digest" in item) for item in named if "uri" not in item] == [True, False]


def test_a_result_is_what_its_statement_says(tmp_path: Path, hashed: Told, verified: Told, made: Path) -> None:
    hashed(made, "--statement", made / "s.json", "--with-source")
    document = verified(made, "--provenance", made / "s.json", "--against", tmp_path / "model")
    assert not ids(document)
    ran = {result["id"]: result["result"] for result in document["checks"]}
    assert {ran[f"provenance.{what}"] for what in ("subject", "plan", "source")} == {"ok"}


@pytest.mark.parametrize("envelope", ["dsse", "bundle"])
def test_a_signed_one_is_opened(tmp_path: Path, hashed: Told, verified: Told, made: Path, envelope: str) -> None:
    hashed(made, "--statement", tmp_path / "s.json")
    payload = base64.b64encode((tmp_path / "s.json").read_bytes()).decode()
    dsse = {"payloadType": "application/vnd.in-toto+json", "payload": payload, "signatures": [{"sig": "AA=="}]}
    (tmp_path / "signed.json").write_text(json.dumps(dsse if envelope == "dsse" else {"dsseEnvelope": dsse}))
    verified(made, "--provenance", tmp_path / "signed.json")
    (made / "config.json").write_text("{}")
    assert "provenance.subject" in ids(verified(made, "--provenance", tmp_path / "signed.json", code=FOUND))


def test_a_changed_byte_is_found(tmp_path: Path, hashed: Told, verified: Told, made: Path) -> None:
    hashed(made, "--statement", tmp_path / "s.json")
    path = made / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    document = verified(made, "--provenance", tmp_path / "s.json", "--select", "provenance", code=FOUND)
    assert [(found["id"], found["file"]) for found in document["findings"]] == [("provenance.subject", path.name)]


def test_files_that_are_gone_or_new_are_found(tmp_path: Path, hashed: Told, verified: Told, made: Path) -> None:
    hashed(made, "--statement", tmp_path / "s.json")
    (made / "model.safetensors.index.json").unlink()
    (made / "extra.safetensors").write_bytes(b"")
    document = verified(made, "--provenance", tmp_path / "s.json", "--select", "provenance", code=FOUND)
    assert {found["file"] for found in document["findings"]} == {"model.safetensors.index.json", "extra.safetensors"}


def test_another_results_statement_is_found(
    tmp_path: Path, hashed: Told, verified: Told, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teller(capsys, "quantize")(tmp_path / "model", tmp_path / "other", "--recipe", RECIPE)
    hashed(tmp_path / "other", "--statement", tmp_path / "s.json")
    document = verified(made, "--provenance", tmp_path / "s.json", code=FOUND)
    assert ids(document) == {"provenance.subject", "provenance.plan"}


def test_another_source_is_found(tmp_path: Path, hashed: Told, verified: Told, made: Path) -> None:
    hashed(made, "--statement", tmp_path / "s.json", "--with-source")
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    arguments = (made, "--provenance", tmp_path / "s.json", "--against", tmp_path / "model", "--select", "provenance")
    assert ids(verified(*arguments, code=FOUND)) == {"provenance.source"}
    hashed(made, "--statement", tmp_path / "t.json", "--with-source", code=SOURCE)
    os.truncate(shard, 100)


def test_refused(tmp_path: Path, hashed: Told, verified: Told, made: Path) -> None:
    hashed(tmp_path / "model", "--statement", tmp_path / "s.json", code=USAGE)
    hashed(made, "--with-source", code=USAGE)
    hashed(made, "--statement", tmp_path / "s.json", "--per-tensor", code=USAGE)
    (tmp_path / "s.json").write_text("x")
    hashed(made, "--statement", tmp_path / "s.json", code=OUTPUT)
    for text in ("x", "[]", "{}", '{"payload": "%%"}', '{"_type": "https://in-toto.io/Statement/v1"}'):
        (tmp_path / "s.json").write_text(text)
        document = verified(made, "--provenance", tmp_path / "s.json", code=USAGE)
        assert ids(document) == {"provenance.statement"}
    verified(made, "--provenance", tmp_path / "absent.json", code=SOURCE)
