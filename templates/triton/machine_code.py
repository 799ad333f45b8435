"""Compile a Triton kernel for a GPU that need not be there, and say what came out.

Triton brings NVIDIA's assembler, so no driver and no toolkit is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TENSOR_CORE = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_OPERANDS = {
    "s8": r"\.s8\.s8(?:\.s32)?$|kind::i8$",
    "fp8": r"\.e[45]m[23]\.e[45]m[23](?:\.f32)?$|kind::f8f6f4$",
    "tf32": r"\.tf32\.tf32(?:\.f32)?$|kind::tf32$",
}


@dataclass(frozen=True)
class MachineCode:
    """What a compiled kernel needs and uses.

    Attributes:
        target: architecture, sm_90.
        registers: of one thread.
        shared_bytes: shared memory of one block.
        stack_bytes: local memory of one thread; spilled registers lie there, nothing else of ours.
        instructions: names of the tensor core instructions, as PTX spells them.
        ptx: the whole text.
    """

    target: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    instructions: tuple[str, ...]
    ptx: str

    @property
    def instruction_class(self) -> str:
        """Kind of tensor core instruction and its operands: ``wgmma s8``; ``-`` without any."""
        if not self.instructions:
            return "-"
        kinds = sorted({name.split(".")[0] for name in self.instructions})
        operands = sorted(
            kind
            for kind, pattern in _OPERANDS.items()
            if any(re.search(pattern, name) for name in self.instructions)
        )
        return " ".join(["+".join(kinds), *operands])


def compile_for(
    function: Any,
    sm: tuple[int, int],
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    warps: int = 4,
    stages: int = 3,
    aligned: tuple[str, ...] = (),
) -> MachineCode:
    """Compile one kernel, without fused multiply-add, as our launches do.

    Args:
        function: what ``triton.jit`` returned.
        sm: compute capability.
        signature: Triton type of each argument that is no constant, in their order.
        constants: value of each ``tl.constexpr`` argument.
        warps: groups of 32 threads of a block.
        stages: tiles in flight.
        aligned: arguments (pointers, strides, sizes) that are multiples of 16.

    Raises:
        triton.CompilationError: the kernel is not valid for the target.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    types = {n: "constexpr" if n in constants else signature[n] for n in names}
    source = ASTSource(
        function,
        types,
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", sm[0] * 10 + sm[1], 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False},
    )
    return describe(compiled, sm)


def describe(compiled: Any, sm: tuple[int, int]) -> MachineCode:
    """Read the facts of a kernel that Triton compiled for ``sm``."""
    ptx: str = compiled.asm["ptx"]
    registers, stack, _, local = _resource_usage(compiled.asm["cubin"])
    return MachineCode(
        target=f"sm_{sm[0]}{sm[1]}",
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        stack_bytes=stack + local,
        instructions=tuple(sorted(set(_TENSOR_CORE.findall(ptx)))),
        ptx=ptx,
    )


def _resource_usage(cubin: bytes) -> tuple[int, ...]:
    """Registers, stack, static shared and local bytes, from the cubin itself."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(text)
    assert found is not None, text
    return tuple(int(number) for number in found.groups())
