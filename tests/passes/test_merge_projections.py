"""MergeProjections: one GEMM for projections that read the same codes, and only for those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from int8_nets import int8_linear, scales
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import qinductor
from qinductor.backend import qsim
from qinductor.capability import Capability

pytestmark = pytest.mark.skipif(
    not Capability.detect().avx512_bf16, reason="the attention it merges for needs avx512_bf16"
)
WIDTH, HEADS = 64, 2


class Attention(nn.Module):
    """Queries, keys and values of x; ``own`` gives some of them scales or a shape of their own."""

    def __init__(self, own: Callable[[int], dict] = lambda index: {}, *, dynamic: bool = False):
        super().__init__()
        given = {"static": scales(0.02, 128), "dynamic": dynamic}
        self.q, self.k, self.v = (
            int8_linear(WIDTH, WIDTH, seed=i, **{**given, **own(i)}) for i in range(3)
        )
        if dynamic:  # convert() gives a group one zero point as well
            self.k.x_zero_point = self.v.x_zero_point = self.q.x_zero_point

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        q, k, v = (self._heads(t) for t in (self.q(x), self.k(other), self.v(other)))
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(x.shape)

    @staticmethod
    def _heads(t: Tensor) -> Tensor:
        return t.view(*t.shape[:2], HEADS, -1).transpose(1, 2)


def _run(net: nn.Module, *args: Tensor, **options: object) -> tuple[Tensor, str, dict]:
    net = net.eval().requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend=qsim, options=options)
    got, (code, *_) = run_and_get_code(compiled, *args)
    return got, code, qinductor.explain(compiled).to_dict()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "per token"])
def test_one_gemm_and_the_same_bits(dynamic: bool) -> None:
    net, x = Attention(dynamic=dynamic), torch.randn(2, 9, WIDTH)
    got, code, report = _run(net, x)
    assert code.count("// u8_s8_qlinear_merged__") == 1 and "// u8_s8_qlinear__" not in code
    fused = [e for e in report["rewrites"] if e["rule"] == "merge_projections"]
    assert {e["site"] for e in fused} == {"q", "k", "v"}
    assert report["linears"]["int8"] == 3, "each linear is counted, and named"
    apart, code, _ = _run(net, x, disable=("merge_projections",))
    assert "qlinear_merged" not in code
    assert torch.equal(got, apart)


def test_keys_and_values_of_another_tensor_are_merged_without_the_queries() -> None:
    net, args = Attention(), (torch.randn(2, 5, WIDTH), torch.randn(2, 11, WIDTH))
    got, code, report = _run(net, *args)
    assert code.count("// u8_s8_qlinear_merged__") == code.count("// u8_s8_qlinear__") == 1
    assert not [e for e in report["refusals"] if e["rule"] == "merge_projections"], "no near miss"
    assert torch.equal(got, _run(net, *args, disable=("merge_projections",))[0])


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (lambda index: {"static": scales(0.02 + index / 100, 128)}, "no other projection"),
        (lambda index: {"bias": index != 1}, "some of the projections have a bias"),
    ],
    ids=["own scale", "own bias"],
)
def test_near_misses_stay_apart_with_a_reason(own: Callable[[int], dict], reason: str) -> None:
    _, code, report = _run(Attention(own), torch.randn(2, 9, WIDTH))
    assert "qlinear_merged" not in code
    refusals = [e["detail"] for e in report["refusals"] if e["rule"] == "merge_projections"]
    assert refusals and all(reason in detail for detail in refusals)
