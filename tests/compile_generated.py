"""Compile the Triton kernels of generated code to machine code, for a GPU that is not there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from qinductor.templates.triton.machine_code import MachineCode, describe

_KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', ", re.M | re.S)
BLOCKS = {"XBLOCK": 1, "R0_BLOCK": 1024}
"""Sizes that autotuning would choose, for reductions."""


class _Captured:
    """In the place of triton_heuristics: keeps what a decorator was given."""

    def __getattr__(self, kind: str) -> Any:
        return lambda **meta: lambda function: (function, meta)


heuristics = _Captured()


def compile_generated(code: str, sm: tuple[int, int], folder: Path) -> dict[str, MachineCode]:
    """Name → machine code of every template and reduction in a wrapper."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = {}
    for name, source in _KERNEL.findall(code):
        if name.startswith("triton_poi"):
            continue
        source = source.replace("triton_helpers.set_driver_to_gpu()\n", "")
        source = source.replace("@triton_heuristics.", "@heuristics.")
        path = folder / f"{name}.py"
        path.write_text("from compile_generated import heuristics\n" + source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function, meta = getattr(module, name)
        given = meta["triton_meta"]
        blocks = {n: BLOCKS[n] for n, kind in given["signature"].items() if kind == "constexpr"}
        compiled = triton.compile(
            ASTSource(function, given["signature"], blocks, given["configs"][0]),
            target=GPUTarget("cuda", sm[0] * 10 + sm[1], 32),
            options={
                "num_warps": meta.get("num_warps", 4),
                "num_stages": meta.get("num_stages", 1),
                # A template does not say: then it is Triton's default.
                **{n: given[n] for n in ("enable_fp_fusion",) if n in given},
            },
        )
        found[name] = describe(compiled, sm)
    return found
