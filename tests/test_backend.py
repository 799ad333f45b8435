"""torch.compile(backend="qsim"): options, errors, gradients, graphs that Dynamo reuses."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_nets import Feedforward, int8_linear, same_bits
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import run_and_get_code

import qinductor
from qinductor import compat
from qinductor.backend import _entries_path, qsim
from qinductor.capability import Capability, Isa
from qinductor.config import QSimConfig, mode_options
from qinductor.errors import BackwardThroughInt8Error, ConfigError, UnknownOptionError
from qinductor.passes import PASSES

X = torch.randn(5, 64)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"izo": 1}}, "'izo'. Valid: check_nan, disable, inductor, isa, simulate"),
        ({"options": {"isa": "sse9"}}, "'sse9'. Valid: portable, avx2, avx512_vnni"),
        ({"options": {"disable": ("fuse_all",)}}, "can be disabled 'fuse_all'.*share_quantize"),
        ({"options": {"disable": ("choose_kernels",)}}, "unknown pass that can be disabled"),
        ({"options": {"disable": "share_quantize"}}, r"disable=\('share_quantize',\)"),
        ({"options": {"inductor": {"no_such": 1}}}, "unknown Inductor option 'no_such'"),
        ({"options": {"inductor": {"cpp": {"threads": 1}}}}, "unknown .*'cpp'.*'cpp.threads'"),
        ({"options": {"inductor": {"os": 1}}}, "unknown Inductor option 'os'"),
        ({"options": {"inductor": 5}}, "inductor=5 is not a mapping.*inductor={'cpp_wrapper'"),
        ({"options": {"inductor": {5: 1}}}, "inductor={5: 1} is not a mapping"),
        ({"options": {"disable": 5}}, r"disable=5 is not a tuple.*disable=\('fuse_activation',\)"),
        ({"options": {"disable": ("fuse_activation", 5)}}, "5\\) is not a tuple of pass names"),
        (
            {"options": {"inductor": {"post_grad_custom_pre_pass": print}}},
            "'post_grad_custom_pre_pass', which this backend sets.*'post_grad_custom_post_pass'",
        ),
        ({"options": {"inductor": {"epilogue_fusion": True}}}, "'epilogue_fusion'.*Leave it out"),
        ({"options": {"check_nan": 1}}, "check_nan=1 is not True or False"),
        ({"mode": "fastest"}, "unknown mode 'fastest'. Valid: .*max-autotune"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_options_say_what_is_valid(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as info:
        torch.compile(int8_linear(64, 64), backend=qsim, **arguments)(X)
    assert isinstance(info.value.__cause__ or info.value.inner_exception, ConfigError)


def test_an_instruction_set_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from qinductor import capability

    only_portable = Capability.detect(Isa.PORTABLE)
    monkeypatch.setattr(capability, "_detect", lambda: only_portable)
    message = (
        "isa='avx2' was asked for, but this machine .* has only: portable. Choose one of these"
    )
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(int8_linear(64, 64), backend=qsim, options={"isa": "avx2"})(X)


def test_config_is_frozen_normalized_and_keyed() -> None:
    config = QSimConfig(isa="portable", disable=("b", "a", "b"))
    assert config.isa is Isa.PORTABLE and config.disable == ("a", "b")
    assert config.cache_key() != QSimConfig(isa="avx2").cache_key()
    with pytest.raises(AttributeError):
        config.isa = None
    with pytest.raises(UnknownOptionError) as info:
        QSimConfig.from_options({"x": 1})
    assert info.value.valid == ("check_nan", "disable", "inductor", "isa", "simulate")


def test_a_capability_is_part_of_the_key() -> None:
    from qinductor.digest import cache_key

    keys = {cache_key(QSimConfig(), Capability.detect(isa)) for isa in Capability.detect().isas}
    assert len(keys) == len(Capability.detect().isas)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_of_inductor_compile(mode: str) -> None:
    layer = int8_linear(64, 64)
    compiled = torch.compile(layer, backend=qsim, mode=mode)
    with torch.no_grad():
        y, (code,) = run_and_get_code(compiled, X)
    assert same_bits(y, layer(X)) and "qinductor::gemm<" in code


DISABLED = {
    "share_quantize": "quantized input of its group",
    "fuse_activation": "relu in the epilogue",
    "fuse_residual": "residual addition",
    "fuse_requantize": "requantized to u8",
}


class Branches(nn.Module):
    """Something for every epilogue pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Feedforward()
        self.q = int8_linear(64, 64, seed=3)
        self.k = int8_linear(64, 64, seed=4)
        for name in ("x_scale", "x_inverse_scale", "x_zero_point"):
            setattr(self.k, name, getattr(self.q, name))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.q(x), self.k(x)


def test_each_pass_can_be_switched_off() -> None:
    net = Branches()
    want = net(X)
    optional = {rule.name for rule in PASSES if rule.optional}
    assert optional >= set(DISABLED)
    for off in ((), *((name,) for name in DISABLED)):
        torch._dynamo.reset()
        compiled = torch.compile(net, backend=qsim, options={"disable": off})
        got = compiled(X)
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True)), off
        graphs_now = qinductor.explain(compiled)
        # The report gathers all compilations of these weights: look at the newest alone.
        fused = {e.detail for e in _newest_entries(net) if e.action == "fused"}
        expected = {text for name, text in DISABLED.items() if name not in off}
        assert {t for t in DISABLED.values() if any(t in d for d in fused)} == expected, off
        assert graphs_now.counts()["int8"] == 4


def _newest_entries(net: nn.Module) -> list[Any]:
    from qinductor.report import RECORDS

    return RECORDS.of({id(t) for t in net.buffers()})[-1].entries


def test_stock_inductor_takes_the_passes_as_a_plugin() -> None:
    net = Feedforward()
    # A cached graph would come without the passes' run, and so without a report.
    options = {**qinductor.inductor_options(isa="portable"), "fx_graph_cache": False}
    compiled = torch.compile(net, options=options)
    y, (code,) = run_and_get_code(compiled, X)
    assert same_bits(y, net(X)) and "qinductor::gemm<qinductor::Portable" in code
    report = qinductor.explain(compiled).to_dict()
    assert report["linears"]["int8"] == 2 and report["graphs"][0]["calls"] is None
    with pytest.raises(UnknownOptionError, match="check_nan, disable, inductor, isa, simulate"):
        qinductor.inductor_options(isb="portable")


def _raw_options(module: Any) -> dict[str, Any]:
    """Every option. Containers are copied; objects are not: a pass that another library put there
    has to stay the very same (get_config_copy() would copy it, and copies are not equal)."""
    raw = {name: operator.attrgetter(name)(module) for name in module.get_config_copy()}
    return {k: copy.deepcopy(v) if isinstance(v, (dict, list, set)) else v for k, v in raw.items()}


def test_nothing_global_is_changed() -> None:
    from torch._inductor import config

    modules = (config, torch._dynamo.config)
    before = [_raw_options(m) for m in modules]
    net = Feedforward()
    for arguments in (
        {"backend": qsim, "mode": "max-autotune"},
        {"backend": qsim, "options": {"isa": "portable", "inductor": {"max_autotune": True}}},
        {"options": qinductor.inductor_options()},
    ):
        torch._dynamo.reset()
        torch.compile(net, **arguments)(X)
    assert [_raw_options(m) for m in modules] == before


def test_options_of_inductor_that_are_no_part_of_its_cache_key_are_accepted() -> None:
    for options in ({"compile_threads": 1}, {"cpp.threads": 1}, {"freezing": False}):
        assert QSimConfig.from_options({"inductor": options}).inductor == options


def test_a_plugin_s_owned_options_are_refused_too() -> None:
    with pytest.raises(ConfigError, match="'epilogue_fusion', which this backend sets itself"):
        qinductor.inductor_options(inductor={"epilogue_fusion": True})


def test_each_compilation_of_a_graph_keeps_its_own_entries() -> None:
    class Pass:
        def __init__(self, version: int) -> None:
            self.version = version

        def uuid(self) -> str:
            return f"mine {self.version}"

    gm = torch.fx.symbolic_trace(nn.ReLU())
    contexts: list[AbstractContextManager[Any]] = [
        nullcontext(),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16),
    ]
    option_sets = [
        {},
        {"freezing": True},
        mode_options("max-autotune"),
        {"post_grad_custom_post_pass": Pass(1)},
        {"post_grad_custom_post_pass": Pass(2)},
    ]

    def all_paths() -> list[Path]:
        paths = []
        for context, gradient in itertools.product(contexts, (False, True)):
            x = X.clone().requires_grad_(gradient)
            with context:
                paths.append(_entries_path(gm, [x, 3], {}, "key"))
        return paths + [_entries_path(gm, [X, 3], o, "key") for o in option_sets[1:]]

    paths = all_paths()
    assert len(set(paths)) == len(paths)
    option_sets[-1] = {"post_grad_custom_post_pass": Pass(2)}
    assert all_paths() == paths


def test_inductor_options_are_passed_on() -> None:
    net = Feedforward()
    compiled = torch.compile(net, backend=qsim, options={"inductor": {"cpp_wrapper": True}})
    y, (code,) = run_and_get_code(compiled, X)
    assert same_bits(y, net(X))
    # All kernels of a graph are one C++ file here: names and helpers may not clash.
    assert code.count("qinductor::gemm<") == 2 and "inductor_entry_impl" in code


def test_equal_layers_share_one_kernel() -> None:
    net = nn.Sequential(*(Feedforward(seed=i) for i in range(5)))
    y, (code,) = run_and_get_code(torch.compile(net, backend=qsim), X)
    assert same_bits(y, net(X))
    assert code.count("qinductor::gemm<") <= 4  # first, middle and last layers differ in dtypes


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendCompilerFailed, match=r"no C\+\+ compiler was found.*apt install g"):
        torch.compile(int8_linear(64, 64), backend=qsim)(X)
    with pytest.raises(qinductor.CompilerMissingError):
        qinductor.inductor_options()


@pytest.mark.parametrize(
    ("version", "known"), [("2.13.0+cpu", True), ("2.14.1", True), ("3.0.0", False)]
)
def test_an_unknown_torch_gets_a_warning(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "__version__", version)
    compat.check_torch_version.cache_clear()
    compat.check_torch_version()
    compat.check_torch_version()  # warns once
    messages = [str(w.message) for w in recwarn]
    compat.check_torch_version.cache_clear()
    if known:
        assert not messages
    else:
        (message,) = messages
        assert version in message and f"install torch=={compat.TESTED}" in message


# ---------------------------------------------------------------- gradients and inference


class Encoder(nn.Module):
    """Embedding and LayerNorm, whose parameters need a gradient, and int8 layers."""

    def __init__(self, dynamic: bool) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 64), nn.LayerNorm(64)
        self.body = Feedforward(dynamic=dynamic)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.norm(self.embedding(ids)))


IDS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize(
    "dynamic",
    [
        pytest.param(False, id="static"),
        pytest.param(True, id="per_token"),
    ],
)
def test_grad_modes_give_equal_outputs_and_backward_is_refused(dynamic: bool) -> None:
    net = Encoder(dynamic)
    assert net.norm.weight.requires_grad
    compiled = torch.compile(net, backend=qsim)
    with_grad = compiled(IDS)
    with torch.no_grad():
        assert same_bits(compiled(IDS), with_grad)
    with torch.inference_mode():
        assert same_bits(compiled(IDS), with_grad)
    # LayerNorm's sums are ordered differently, and a code may differ by one: half a quantum of
    # each operand, far below the wrong layout or scale this is to catch.
    eager = net(IDS)
    assert (with_grad - eager).abs().max() < 0.05 * eager.abs().max()
    for output in (with_grad, eager):
        with pytest.raises(BackwardThroughInt8Error, match="qinductor::qlinear has no gradient"):
            output.sum().backward()
    assert net.norm.weight.grad is None


def test_an_unquantized_model_compiles_and_trains() -> None:
    net = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    compiled = torch.compile(net, backend=qsim)
    compiled(X).sum().backward()
    gradient = net[0].weight.grad.clone()
    net.zero_grad()
    net(X).sum().backward()
    torch.testing.assert_close(gradient, net[0].weight.grad)
    assert qinductor.explain(compiled).counts() == {
        "total": 2,
        "int8": 0,
        "simulated": 0,
        "kept": 2,
    }


# ---------------------------------------------------------------- one graph, many weights


def test_models_of_one_class_share_no_weights() -> None:
    for seed in (0, 20):
        net = Feedforward(seed=seed)
        assert same_bits(torch.compile(net, backend=qsim)(X), net(X))


def test_regional_compilation_gives_each_layer_its_own_weights() -> None:
    net = nn.Sequential(*(Feedforward(seed=i) for i in range(3)))
    want = net(X)
    for layer in net:
        layer.compile(backend=qsim)
    assert same_bits(net(X), want)


def test_one_layer_used_twice() -> None:
    layer = int8_linear(64, 64)

    def function(x: Tensor) -> Tensor:
        return layer(torch.relu(layer(x)))

    assert same_bits(torch.compile(function, backend=qsim)(X), function(X))


def test_weights_may_be_updated_in_place_or_replaced() -> None:
    net = Feedforward()
    compiled = torch.compile(net, backend=qsim)
    before = compiled(X)
    other = int8_linear(130, 64, seed=9)
    net.up.packed.copy_(other.packed)
    net.up.w_sum.copy_(other.w_sum)
    net.up.x_scale.mul_(2)
    changed = compiled(X)
    assert same_bits(changed, net(X)) and not same_bits(changed, before)
    net.down.bias = net.down.bias + 1
    assert same_bits(compiled(X), net(X))
    net.up = int8_linear(130, 64, seed=12)
    assert same_bits(compiled(X), net(X))


def test_batches_of_any_size_after_the_second_use_one_graph() -> None:
    net = Feedforward()
    compiled = torch.compile(net, backend=qsim)
    for rows in (3, 4):
        compiled(torch.randn(rows, 64))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (2, 5, 64, 129):
            x = torch.randn(rows, 64)
            assert same_bits(compiled(x), net(x))


def test_every_dimension_may_be_dynamic() -> None:
    """dynamic=True makes K a symbol as well; the weight's shape has it back."""
    net = Feedforward()
    compiled = torch.compile(net, backend=qsim, dynamic=True)
    for shape in ((2, 3, 64), (4, 5, 64)):
        x = torch.randn(shape)
        assert same_bits(compiled(x), net(x))


def test_autocast_changes_nothing_inside_an_int8_layer() -> None:
    net = Feedforward()
    want = net(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(net(X), want)
        assert same_bits(torch.compile(net, backend=qsim)(X), want)
