"""torchao's int8 linears in real Inductor graphs: rewritten, or refused with a reason."""

from __future__ import annotations

import re
from typing import Any

import foreign
import pytest
import torch
from models import tiny_bert
from tolerances import UNIT_ROUNDOFF, half_rounding_bound, one_step_bound
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import qinductor
from qinductor.backend import inductor_options, qsim
from qinductor.ops import MAX_K
from qinductor.passes import chain
from qinductor.passes.torchao_chain import TorchaoChain

aten = torch.ops.aten
INT_MM = aten._int_mm.default
OLD = (INT_MM, aten.round.default, aten.clamp_min.default, aten.amin.default)
RULE = TorchaoChain()


def _first(graph: fx.Graph, target: Any) -> fx.Node:
    return next(n for n in graph.nodes if n.target is target)


def _add_output(graph: fx.Graph, node: fx.Node) -> None:
    (out,) = (n for n in graph.nodes if n.op == "output")
    out.args = ((*out.args[0], node),)


# ---------------------------------------------------------------- what torchao emits


@pytest.mark.parametrize(
    ("static", "smooth", "bias", "shape"),
    [
        (True, True, True, (2, 3, 64)),
        (True, False, False, (5, 64)),
        (False, True, False, (2, 3, 64)),
        (False, False, True, (5, 64)),
    ],
    ids=["static-smooth-3d", "static-plain-2d", "dynamic-smooth-3d", "dynamic-plain-2d"],
)
def test_float32_chain_is_replaced_and_equal(
    static: bool, smooth: bool, bias: bool, shape: tuple[int, ...]
) -> None:
    x = foreign.inputs(*shape)
    model = foreign.torchao_model(foreign.mlp(bias=bias), x, static=static, smooth=smooth)
    got = foreign.capture(model, x, RULE)
    assert got.count(*OLD) == 0
    assert got.count(chain.QLINEAR) == 2
    assert got.count(chain.PACKED_OF) == 1
    assert got.count(chain.QUANTIZE if static else chain.PER_TOKEN) == 2
    assert [(e.site, e.action) for e in got.entries] == [("0", "fused"), ("2", "fused")]
    assert all("packed once per process" in d for d in got.details("fused"))
    for node in got.after.graph.nodes:
        if node.target is chain.QLINEAR:
            assert node.meta["val"].dim() == len(shape)  # no view between the linears
            assert (node.args[6] is not None) == bias
    old, new = got.outputs()
    assert torch.equal(old, new)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_weight_with_one_scale_is_equal(static: bool) -> None:
    x = foreign.inputs(5, 64)
    model = foreign.torchao_model(foreign.mlp(), x, static=static, per_tensor_weight=True)
    got = foreign.capture(model, x, RULE)
    assert got.count(chain.QLINEAR) == 2
    old, new = got.outputs()
    assert torch.equal(old, new)


def test_signed_product_without_the_shift_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that torchao emits on machines with AMX, and on those without VNNI."""
    monkeypatch.setattr("torchao.kernel.intmm._cpu_is_vnni_supported", lambda: False)
    x = foreign.inputs(2, 3, 64)
    for static in (True, False):
        model = foreign.torchao_model(foreign.mlp(), x, static=static)
        got = foreign.capture(model, x, RULE)
        assert not any(n.target is aten.sum.dim_IntList for n in got.before.graph.nodes)
        assert got.count(*OLD) == 0
        assert got.count(chain.QLINEAR) == 2
        old, new = got.outputs()
        assert torch.equal(old, new)


def test_asymmetric_static_zero_point_moves_into_the_linear() -> None:
    x = foreign.inputs(2, 3, 64)
    model = foreign.torchao_model(foreign.one_linear(), x, static=True, asymmetric=True)
    quantized = model[0].weight
    assert int(quantized.act_quant_zero_point) != 0
    got = foreign.capture(model, x, RULE)
    assert got.count(*OLD, aten.sub.Tensor) == 0
    old, new = got.outputs()
    # torchao rounds acc * s, z * s, its product with the weight's sum, and their difference, each
    # at most as large as 2**24 codes; ours rounds the exact difference. Five roundings of a term.
    weight = quantized.qdata.double()
    scale = quantized.act_quant_scale.double().reshape(())
    zero_point = quantized.act_quant_zero_point.double().reshape(())
    terms = 128 * weight.abs().sum(1) + zero_point.abs() * weight.sum(1).abs()
    bound = 2.0**-24 * 6 * terms * scale * quantized.scale.flatten().double()
    bound = bound + 2.0**-24 * 2 * old.double().abs()
    assert ((old.double() - new.double()).abs() <= bound).all()


def test_asymmetric_dynamic_keeps_its_quantizer_and_correction() -> None:
    x = foreign.inputs(2, 3, 64)
    model = foreign.torchao_model(foreign.mlp(), x, static=False, asymmetric=True)
    got = foreign.capture(model, x, RULE)
    assert got.count(INT_MM) == 0
    assert got.count(chain.QLINEAR) == 2
    assert got.count(aten.sum.dim_IntList) == 0  # its correction reads the remembered sums
    assert ["one zero point a token" in d for d in got.details("refused")] == [True, True]
    old, new = got.outputs()
    assert torch.equal(old, new)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_narrow_range_keeps_its_quantizer(static: bool) -> None:
    x = foreign.inputs(5, 64)
    model = foreign.torchao_model(foreign.mlp(), x, static=static, reduce_range=True)
    got = foreign.capture(model, x, RULE)
    assert got.count(chain.QUANTIZE, chain.PER_TOKEN, INT_MM) == 0
    assert all("range is [-64, 63]" in d for d in got.details("refused"))
    assert len(got.details("refused")) == 2
    old, new = got.outputs()
    assert torch.equal(old, new)


def test_static_scale_a_row_keeps_its_quantizer() -> None:
    x = foreign.inputs(5, 64)
    model = foreign.torchao_model(foreign.mlp(), x, static=True, per_row_static=True)
    got = foreign.capture(model, x, RULE)
    assert got.count(chain.QUANTIZE, INT_MM) == 0
    assert got.count(chain.QLINEAR) == 2
    old, new = got.outputs()
    assert torch.equal(old, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_static_linear_is_within_its_roundings(dtype: torch.dtype) -> None:
    x = foreign.inputs(2, 3, 64, dtype=dtype)
    model = foreign.torchao_model(foreign.one_linear(dtype=dtype), x, static=True)
    got = foreign.capture(model, x, RULE)
    assert got.count(*OLD) == 0
    assert _first(got.after.graph, chain.QLINEAR).meta["val"].dtype is dtype
    old, new = got.outputs()
    # The output that the product is computed back from was rounded once.
    product = (old.double() - model[0].bias.double()).abs()
    product = product + UNIT_ROUNDOFF[dtype] * old.double().abs()
    assert ((old.double() - new.double()).abs() <= half_rounding_bound(product, old)).all()


def test_half_dynamic_linear_differs_by_the_rounding_of_its_scale() -> None:
    x = foreign.inputs(2, 3, 64, dtype=torch.bfloat16)
    net = foreign.one_linear(dtype=torch.bfloat16)
    model = foreign.torchao_model(net, x, static=False, smooth=False)
    got = foreign.capture(model, x, RULE)
    assert got.count(*OLD) == 0
    assert got.count(chain.PER_TOKEN) == 1
    old, new = got.outputs()
    # torchao's scale is rounded to bfloat16, by up to 2**-8. Its largest code, 127.5 * (1 + 2**-8),
    # is clamped by one step, others are rounded by half of one; ours are rounded by half a step.
    weight = model[0].weight.qdata.double() * model[0].weight.scale.double()
    scale = x.double().abs().amax(-1, keepdim=True) / 127.5 * (1 + 2.0**-8)
    product = old.double().abs() + model[0].bias.double().abs()
    bound = 1.5 * one_step_bound(scale, weight) + half_rounding_bound(product, old)
    assert ((old.double() - new.double()).abs() <= bound).all()


def test_linears_of_one_input_share_their_quantizer() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 32), nn.Linear(64, 48)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    x = foreign.inputs(5, 64)
    model = foreign.torchao_model(Two().eval(), x, static=False, smooth=False)
    got = foreign.capture(model, x, RULE)
    arguments = {n.args for n in got.after.graph.nodes if n.target is chain.PER_TOKEN}
    assert len(arguments) == 1  # equal arguments: share_quantize makes them one
    assert got.count(chain.PACKED_OF) == 1


def test_symbolic_batch_and_length() -> None:
    x = foreign.inputs(2, 3, 64)
    model = foreign.torchao_model(foreign.mlp(bias=False), x, static=False)
    got = foreign.capture(model, x, RULE, dynamic=True)
    assert got.count(*OLD) == 0
    shapes = [n.meta["val"].shape for n in got.after.graph.nodes if n.target is chain.QLINEAR]
    assert all(isinstance(m, torch.SymInt) for shape in shapes for m in shape[:2])
    assert [len(shape) for shape in shapes] == [3, 3]


@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize("rows", [(), (1,), (2, 1)], ids=str)
def test_odd_sizes_and_single_rows_are_equal(rows: tuple[int, ...], n: int) -> None:
    x = foreign.inputs(*rows, 30)
    model = foreign.torchao_model(
        nn.Sequential(nn.Linear(30, n)).eval(), x, static=False, smooth=False
    )
    got = foreign.capture(model, x, RULE)
    assert got.count(INT_MM) == 0
    assert got.count(chain.QLINEAR) == 1
    old, new = got.outputs()
    assert old.shape == new.shape
    assert torch.equal(old, new)


# ---------------------------------------------------------------- near misses


def _refused(edit: Any, *, static: bool = True) -> foreign.Capture:
    x = foreign.inputs(5, 64)
    model = foreign.torchao_model(foreign.one_linear(), x, static=static)
    return foreign.capture(model, x, RULE, edit=edit)


def test_four_bit_codes_keep_their_quantizer() -> None:
    def edit(graph: fx.Graph) -> None:
        low, high = _first(graph, aten.clamp_min.default), _first(graph, aten.clamp_max.default)
        low.args, high.args = (low.args[0], -8), (high.args[0], 7)

    got = _refused(edit)
    assert got.count(chain.QUANTIZE) == 0
    assert any("range is [-8, 7], not [-128, 127]" in d for d in got.details("refused"))
    old, new = got.outputs()
    assert torch.equal(old, new)


def test_division_by_the_scale_is_not_its_reciprocal() -> None:
    def edit(graph: fx.Graph) -> None:
        rounded = _first(graph, aten.round.default)
        product = rounded.args[0]
        product.target = aten.div.Tensor

    got = _refused(edit)
    assert got.count(chain.QUANTIZE) == 0
    assert any("not multiplied by the reciprocal" in d for d in got.details("refused"))


def test_scale_of_another_tensor_is_not_per_token() -> None:
    def edit(graph: fx.Graph) -> None:
        extreme = _first(graph, aten.amax.default)
        with graph.inserting_before(extreme):
            other = graph.call_function(aten.neg.default, (extreme.args[0],))
        other.meta["val"] = extreme.args[0].meta["val"]
        extreme.args = (other, *extreme.args[1:])

    got = _refused(edit, static=False)
    assert got.count(chain.PER_TOKEN) == 0
    assert any("not that of a symmetric row" in d for d in got.details("refused"))
    old, new = got.outputs()
    assert torch.equal(old, new)


def test_shift_without_its_compensation_is_refused() -> None:
    def edit(graph: fx.Graph) -> None:
        product = _first(graph, INT_MM)
        (sub,) = product.users
        if sub.target is not aten.sub.Tensor:
            pytest.skip("torchao does not shift on this machine")
        sub.replace_all_uses_with(product)
        graph.erase_node(sub)

    got = _refused(edit)
    assert got.count(INT_MM) == 1
    assert got.count(chain.QLINEAR) == 0
    assert any("is not subtracted" in d for d in got.details("refused"))


def test_reader_of_the_accumulator_is_refused() -> None:
    def edit(graph: fx.Graph) -> None:
        floats = next(
            n
            for n in graph.nodes
            if n.target is chain.CONVERT and n.args[1] is torch.float32
            and n.args[0].meta["val"].dtype is torch.int32
        )  # fmt: skip
        _add_output(graph, floats.args[0])

    got = _refused(edit)
    assert got.count(INT_MM) == 1
    assert any("reader other than its conversion" in d for d in got.details("refused"))


def test_reader_of_an_intermediate_value_keeps_it() -> None:
    def edit(graph: fx.Graph) -> None:
        floats = next(
            n for n in graph.nodes
            if n.target is chain.CONVERT and n.args[1] is torch.float32
        )  # fmt: skip
        (scaled,) = floats.users
        (out,) = (n for n in graph.nodes if n.op == "output")
        out.args = ((scaled, *out.args[0]),)

    got = _refused(edit)
    assert got.count(INT_MM) == 0
    assert any("scale of the weight stays outside" in d for d in got.details("fused"))
    for position in (0, 1):
        with torch.no_grad():
            old, new = (
                fx.Interpreter(gm).run(*got.arguments)[position] for gm in (got.before, got.after)
            )
        assert torch.equal(old, new)


def test_computed_weight_is_refused() -> None:
    def edit(graph: fx.Graph) -> None:
        transposed = _first(graph, INT_MM).args[1]
        with graph.inserting_before(transposed):
            computed = graph.call_function(aten.neg.default, (transposed.args[0],))
        computed.meta["val"] = transposed.args[0].meta["val"]
        transposed.args = (computed, transposed.args[1])

    got = _refused(edit)
    assert got.count(INT_MM) == 1
    assert any("computed in the graph" in d for d in got.details("refused"))


def test_too_long_k_is_refused() -> None:
    x = foreign.inputs(2, MAX_K + 1)
    net = nn.Sequential(nn.Linear(MAX_K + 1, 2)).eval()
    model = foreign.torchao_model(net, x, static=False, smooth=False)
    got = foreign.capture(model, x, RULE)
    assert got.count(INT_MM) == 1
    assert any(f"K={MAX_K + 1} can overflow" in d for d in got.details("refused"))


def test_weight_on_another_device_is_refused() -> None:
    graph = fx.Graph()
    weight = graph.placeholder("w")
    weight.meta["val"] = torch.empty((4, 8), dtype=torch.int8, device="meta")
    assert "device meta" in (chain.reason_against_weight(weight) or "")


# ---------------------------------------------------------------- compiled


@pytest.mark.parametrize(
    ("static", "how"), [(True, "backend"), (False, "backend"), (False, "options")]
)
def test_compiled_model_runs_int8_and_is_equal(static: bool, how: str) -> None:
    x = foreign.inputs(2, 3, 64)
    model = foreign.torchao_model(foreign.mlp(), x, static=static)
    torch._dynamo.reset()
    given: dict[str, Any] = {"backend": qsim} if how == "backend" else {}
    if how == "options":
        # A graph found in Inductor's cache shows no code, and stock Inductor tells nobody.
        given["options"] = {**inductor_options(), "fx_graph_cache": False}
    compiled = torch.compile(model, dynamic=True, **given)
    with torch.no_grad():
        got, codes = run_and_get_code(compiled, x)
        assert torch.equal(got, model(x))
        before = counters["stats"]["unique_graphs"]
        for shape in ((3, 5, 64), (7, 2, 64)):
            other = foreign.inputs(*shape, seed=sum(shape))
            assert torch.equal(compiled(other), model(other))
        assert counters["stats"]["unique_graphs"] == before
    with torch.inference_mode():
        assert torch.equal(compiled(x), model(x))
    if how == "options":
        (code,) = codes
        assert len(re.findall(r"// u8_s8_qlinear(_rows)?__", code)) == 2
        assert "_int_mm" not in code
    else:
        counts = qinductor.explain(compiled).counts()
        assert counts == {"total": 2, "int8": 2, "simulated": 0, "kept": 0}


def test_bert_runs_every_linear_of_its_encoder_as_int8() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = tiny_bert(layers=1)
    quantize_(
        model,
        Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        filter_fn=lambda m, name: isinstance(m, nn.Linear) and "encoder" in name,
    )
    ids = torch.arange(14).reshape(2, 7)
    got = foreign.capture(model, ids, RULE)
    assert got.count(INT_MM) == 0
    assert got.count(chain.QLINEAR) == 6
    assert {e.site for e in got.entries} == {
        f"encoder.layer.0.{name}"
        for name in (
            "attention.self.query", "attention.self.key", "attention.self.value",
            "attention.output.dense", "intermediate.dense", "output.dense",
        )
    }  # fmt: skip
    old, new = got.outputs()
    assert torch.equal(old, new)
