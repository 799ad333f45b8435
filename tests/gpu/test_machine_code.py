"""What the kernels compile to: tensor core instructions, no spilled registers, memory that fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compile_generated import compile_generated
from stated_gpu import generate
from torch import Tensor, nn

from qinductor.capability import Gpu
from qinductor.gpu import in_layout_of
from qinductor.ops import pack_weight
from qinductor.templates.triton.catalog import KERNELS, TARGETS, Kernel
from qinductor.templates.triton.machine_code import MachineCode

pytestmark = pytest.mark.cubin
INSTRUCTIONS = {(8, 0): ("mma s8",), (9, 0): ("wgmma s8",), (10, 0): ("mma s8", "tcgen05 s8")}
"""Triton 3.9 knows the second of Blackwell's; torch 2.13 comes with 3.7."""


def contracts(code: MachineCode) -> bool:
    """True if a product and a sum are rounded together, which changes results in their last bit."""
    return re.search(r"\bfma\.rn(\.ftz)?\.f(32|64)", code.ptx) is not None


def check(code: MachineCode, sm: tuple[int, int]) -> None:
    assert code.stack_bytes == 0, f"{code.stack_bytes} bytes of spilled registers"
    assert 0 < code.registers <= 255
    assert code.shared_bytes <= Gpu(sm).shared_bytes


@pytest.mark.parametrize(
    ("kernel", "sm"),
    [(kernel, sm) for kernel in KERNELS for sm in kernel.targets],
    ids=lambda value: value.name if isinstance(value, Kernel) else "sm_{}{}".format(*value),
)
def test_kernel(kernel: Kernel, sm: tuple[int, int]) -> None:
    code = kernel.compile(sm)
    check(code, sm)
    assert not contracts(code)
    if kernel.operands is None:
        assert code.instructions == ()
    else:
        assert code.instruction_class.endswith(f" {kernel.operands}")
        assert f".target sm_{sm[0]}{sm[1]}" in code.ptx


ops = torch.ops.qinductor


class Layer(nn.Module):
    """LayerNorm, per-token codes, int8 linear, activation, codes for the next layer."""

    def __init__(self, k: int, n: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.norm = nn.LayerNorm(k)
        weight = torch.zeros(n, k, dtype=torch.int8)
        packed = in_layout_of(torch.device("cuda"), pack_weight(weight))
        for name, t in {
            "packed": packed,
            "w_scale": torch.ones(n),
            "w_sum": torch.zeros(n, dtype=torch.int32),
            "bias": torch.zeros(n),
            "zero_point": torch.tensor(128, dtype=torch.int32),
            "inverse": torch.tensor(1.0),
        }.items():
            self.register_buffer(name, t)

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = ops.quantize_per_token(self.norm(x))
        y = ops.qlinear(
            codes, scale, self.zero_point, self.packed, self.w_scale, self.w_sum, self.bias
        )
        return ops.quantize(self.activation(y), self.inverse, self.zero_point)


@pytest.mark.parametrize("sm", TARGETS, ids=lambda sm: "sm_{}{}".format(*sm))
@pytest.mark.parametrize("activation", [torch.relu, nn.functional.gelu], ids=["relu", "gelu"])
def test_what_inductor_makes_of_a_layer(
    sm: tuple[int, int], activation: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """The whole epilogue, activation and requantization, fits the registers."""
    made = generate(sm, Layer(1024, 4096, activation), torch.zeros(4096, 1024))
    assert [name.split("_")[1] for name in made.kernels()] == ["per", "tem"]
    compiled = compile_generated(made.code, sm, tmp_path)
    assert len(compiled) == 2
    for code in compiled.values():
        check(code, sm)
    template = next(code for name, code in compiled.items() if name.startswith("triton_tem"))
    assert template.instruction_class in INSTRUCTIONS[sm]
    assert not contracts(template)
    assert "div.rn.f32" in "".join(code.ptx for code in compiled.values()), "scales are exact"


def test_spilled_registers_are_seen() -> None:
    """A tile too large for its warps: the count that the tests above want to be zero is not."""
    import triton.language as tl

    from qinductor.templates.triton.gemm_tile import gemm_kernel
    from qinductor.templates.triton.machine_code import compile_for

    code = compile_for(
        gemm_kernel,
        (8, 0),
        {**dict.fromkeys("ab", "*i8"), "out": "*i32"}
        | dict.fromkeys(("M", "N", "K", "N_ROWS", "K_SPLIT", "stride_a", "stride_b"), "i32"),
        {
            "ACC": tl.int32, "OTHER": 0, "BLOCK_M": 256, "BLOCK_N": 256, "BLOCK_K": 32,
            "GROUP_M": 8, "EVEN_K": True,
        },
        warps=4,
        aligned=("a", "b", "stride_a", "stride_b"),
    )  # fmt: skip
    assert code.stack_bytes > 0
