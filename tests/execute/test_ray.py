"""A Ray cluster of three nodes makes the bytes of one run, also when one of them is killed meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from make import checkpoint, llama_config

from ckptkit.errors import ENGINE, OK, UserError
from ckptkit.execute import ray_cluster

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

RECIPE = ["--recipe", "w4a16"]
SHARDS, ROWS, COLUMNS = 24, 2048, 1024


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A layer's matrices in each of many shards, so that there is time to lose a node."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    parts = [{f"model.layers.{i}.mlp.up_proj.weight": matrix(ROWS, COLUMNS)} for i in range(SHARDS)]
    parts[0] |= {"model.embed_tokens.weight": matrix(512, COLUMNS), "lm_head.weight": matrix(512, COLUMNS)}
    parts[0]["model.norm.weight"] = torch.ones(COLUMNS, dtype=torch.bfloat16)
    config = llama_config(layers=SHARDS, hidden=COLUMNS, inter=ROWS)
    return checkpoint(tmp_path / "model", parts, config)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[cluster_utils.Cluster]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    made.shutdown()


def run(*arguments: object) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "ckptkit",
        *map(str, arguments),
        "--json",
        "--jobs",
        "1",
        "--allow",
        "recipe.class-reach",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "ckptkit.json"}


@pytest.mark.slow
def test_a_node_is_killed_and_the_bytes_are_those_of_one_run(
    tmp_path: Path, source: Path, cluster: cluster_utils.Cluster
) -> None:
    whole = run("quantize", source, tmp_path / "whole", *RECIPE)
    whole.communicate(timeout=300)
    assert whole.returncode == OK
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    process = run("quantize", source, tmp_path / "out", *RECIPE, "--executor", "ray", "--address", cluster.address)
    parts = tmp_path / "out.parts"
    killed = threading.Event()

    def kill() -> None:
        """Once a few parts are there, and others are not."""
        while process.poll() is None:
            if len(list(parts.glob("*-of-*/ckptkit.json"))) >= 3:
                cluster.remove_node(nodes[0], allow_graceful=False)
                killed.set()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    out, err = process.communicate(timeout=600)
    thread.join()
    assert process.returncode == OK, out + err
    assert killed.is_set()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not parts.exists()
    again = run(
        "quantize", source, tmp_path / "out", *RECIPE, "--executor", "ray", "--address", cluster.address, "--overwrite"
    )
    out, err = again.communicate(timeout=600)
    assert again.returncode == OK, out + err
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("processors", "nodes", "fits"),
    [(2, [1, 2], True), (3, [1, 2], False), (1, [], True), (8, [0], True), (2, [1, None], False)],
)
def test_more_processors_than_any_node_has(processors: int, nodes: list[int | None], fits: bool) -> None:
    """None is a node that is gone."""
    told = [
        {"Alive": count is not None, "Resources": {"CPU": float(count or 9)} if count != 0 else {}} for count in nodes
    ]
    if fits:
        ray_cluster._fit(processors, told)
        return
    with pytest.raises(UserError) as caught:
        ray_cluster._fit(processors, told)
    assert [finding.id for finding in caught.value.findings] == ["engine.ray"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999"])
def test_without_a_cluster_nothing_is_left(tmp_path: Path, source: Path, address: str) -> None:
    process = run("quantize", source, tmp_path / "out", *RECIPE, "--executor", "ray", "--address", address)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == ENGINE
    assert [finding["id"] for finding in json.loads(out)["findings"]] == ["engine.ray"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
