"""What shows only in a process of its own: imports, the entry point, caches, memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def _python(*args: str, paths: tuple[Path, ...] = (), **environment: str) -> str:
    env = os.environ | environment
    env["PYTHONPATH"] = os.pathsep.join(map(str, (*paths, TESTS)))
    done = subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, check=False, cwd=TESTS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import qinductor
seconds = time.perf_counter() - start
new = set(sys.modules) - before
others = ("torch", "sympy", "transformers")
print(json.dumps([seconds, sorted(m for m in new if m.startswith(others))]))
"""


def test_import_is_quick_and_lazy() -> None:
    runs = [json.loads(_python("-c", IMPORT)) for _ in range(2)]
    assert runs[0][1] == []  # torch._inductor, torchao and all others are imported on first use
    assert min(seconds for seconds, _ in runs) < 0.2


FIND = """
import sys
import torch
assert "qsim" in torch._dynamo.list_backends(exclude_tags=())
assert "qinductor" not in sys.modules
found = torch._dynamo.lookup_backend("qsim")
print(found.__module__, found.__name__)
"""


def test_the_backend_is_found_without_an_import() -> None:
    from importlib.metadata import entry_points

    if not entry_points(group="torch_dynamo_backends", name="qsim"):
        pytest.skip("the package is not installed (pip install -e .), so nothing names its backend")
    assert _python("-c", FIND) == "qinductor.backend qsim"


def _compile_in_a_process(cache: Path, *paths: Path) -> dict[str, Any]:
    script = str(TESTS / "second_process.py")
    # Without the probes of what the compiler can build, which take 5 s in an empty cache.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    out = _python(script, paths=paths, OMP_NUM_THREADS="1", **environment)
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_second_process_hits_the_cache_and_an_edited_source_misses(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    package = tmp_path / "copy" / "qinductor"
    ignored = shutil.ignore_patterns("__pycache__", "bench")
    shutil.copytree(ROOT / "qinductor", package, ignore=ignored)

    cold = _compile_in_a_process(cache, package.parent)
    assert Path(cold["package"]) == package
    assert cold["fx_hits"] == cold["fx_bypassed"] == 0 and cold["from_cache"] == [False]
    assert cold["equals_eager"] and cold["report"]["linears"]["int8"] == 4

    warm = _compile_in_a_process(cache, package.parent)
    assert warm["from_cache"] == [True] and warm["aot_hits"] == 1 and warm["fx_bypassed"] == 0
    assert warm["output"] == cold["output"]
    assert warm["report"] == cold["report"]

    # Without the stored report, the graph is compiled again rather than reported as empty.
    shutil.rmtree(cache / "qinductor")
    unknown = _compile_in_a_process(cache, package.parent)
    assert unknown["report"] == cold["report"] and unknown["output"] == cold["output"]

    header = package / "templates" / "cpu" / "int8_gemm.h"
    header.write_text(header.read_text() + "// edited\n")
    edited = _compile_in_a_process(cache, package.parent)
    assert edited["from_cache"] == [False] and edited["fx_hits"] == edited["aot_hits"] == 0
    assert edited["output"] == cold["output"]


@pytest.mark.slow  # a timing: it means something only while nothing else runs
def test_a_warm_cache_cuts_compilation_to_a_third(tmp_path: Path) -> None:
    cold, warm = (_compile_in_a_process(tmp_path / "cache", ROOT) for _ in range(2))
    assert warm["from_cache"] == [True]
    assert warm["seconds"] <= cold["seconds"] / 3


def test_the_digest_covers_every_source_file() -> None:
    from qinductor import digest

    package = ROOT / "qinductor"
    seen = set()
    for folder, _, names in os.walk(package, followlinks=True):
        seen |= {Path(folder, n).suffix for n in names if "__pycache__" not in folder}
    # Every kind of file that code is generated from; typed markers and bench/results are none.
    assert seen - {".typed", ".json", ""} <= set(digest._SUFFIXES), seen


@pytest.mark.slow
def test_an_int8_bert_base_needs_less_memory_than_a_float_one(tmp_path: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    import qinductor

    model = BertModel(BertConfig()).eval()
    ids = torch.arange(2 * 16).view(2, 16) + 1000
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model.save_pretrained(tmp_path / "float")
    qinductor.save(qinductor.quantize_model(model, [batch]), tmp_path / "int8")
    script = str(TESTS / "second_process.py")
    used = {
        kind: float(_python(script, "memory", kind, str(tmp_path / kind), OMP_NUM_THREADS="1"))
        for kind in ("int8", "float")
    }
    assert used["int8"] < used["float"], used
