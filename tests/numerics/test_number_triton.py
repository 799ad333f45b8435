"""The Triton functions: the eager bits in the interpreter, machine code for three GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

import triton_kernels as tk  # noqa: E402

from qinductor.numerics import Rounding  # noqa: E402
from qinductor.numerics.triton_twin import triton_quantizer  # noqa: E402

HERE = Path(__file__).parent
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}


@pytest.mark.interpret
def test_interpreted_bits_are_eagers():
    # Triton decides between interpreting and compiling when it is imported.
    folders = [str(HERE.parents[1]), str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(HERE / "triton_interpreted.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("equal:")[1]) > 450


def compiled(fmt, dtype, mode, capability, bits=32):
    """Machine code of a kernel that quantizes a tile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"Q": triton_quantizer(fmt, dtype, mode), "ROWS": 16, "COLUMNS": tk.block_of(fmt)}
    signature = {"x_ptr": TYPES[dtype], "out_ptr": TYPES[dtype]}
    kernel = tk.apply
    if mode is Rounding.STOCHASTIC:
        kernel = tk.apply_random
        signature |= {"seed": "i64", "step": "i64", "site": "i64", "offset": "i64"}
        constants["BITS"] = bits
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False}
    )


CASES = [
    *((name, torch.float32, mode, 90) for name in tk.FORMATS
      for mode in (Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC)),
    *(("E4M3", dtype, Rounding.STOCHASTIC, 90) for dtype in tk.DTYPES[1:]),
    *(("E4M3", torch.float32, mode, 90) for mode in Rounding),
    *((name, torch.bfloat16, Rounding.STOCHASTIC, capability)
      for name in ("E4M3", "MXFP4", "POSIT8") for capability in (80, 100)),
]  # fmt: skip


@pytest.mark.cubin
def test_machine_code_for_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seen = set()
    for name, dtype, mode, capability in dict.fromkeys(CASES):
        binary = compiled(tk.FORMATS[name], dtype, mode, capability)
        assert binary.asm["cubin"].startswith(b"\x7fELF"), (name, dtype, mode)
        suffix = "a" if capability >= 90 else ""
        assert f".target sm_{capability}{suffix}" in binary.asm["ptx"]
        # Nothing that a compiler may contract or approximate.
        assert "fma.rn" not in binary.asm["ptx"] and "mul.f" not in binary.asm["ptx"]
        seen.add(binary.asm["cubin"])
    assert len(seen) > 30


def test_one_function_for_equal_formats():
    a = triton_quantizer("E4M3", torch.float32)
    assert a is triton_quantizer(tk.NAMED["E4M3"], torch.float32)
    assert a is not triton_quantizer("E4M3", torch.float32, Rounding.UPWARD)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("NVFP4_E2M1", torch.float32), "no Triton function"),
        (("INT8", torch.float32), "no Triton function"),
        (("E8M0", torch.float32), "E4M3"),
        (("POSIT8", torch.float32, Rounding.UPWARD), "TIES_TO_EVEN"),
        ((tk.FORMATS["qtorch float"], torch.float64), "float32"),
        (("E4M3", torch.int32), "torch.int32"),
    ],
)
def test_bad_input(arguments, match):
    with pytest.raises(ValueError, match=match):
        triton_quantizer(*arguments)
