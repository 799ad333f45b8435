"""Rules, presets, TOML and JSON, and what is said of a spec that is wrong."""

from __future__ import annotations

import pytest
import sim_nets as nets
import torch

from qinductor import Accumulator, ConfigError, Precision, Rounding, Rule, SimulationSpec, simulate
from qinductor.numerics import E4M3, E5M2, FixedPoint
from qinductor.simulation import OPERATIONS, PRESETS, Role


def test_later_rules_win_role_by_role():
    spec = SimulationSpec(
        (
            Rule(op="linear", input="E4M3", weight="E4M3"),
            Rule("enc.*", weight="E5M2"),
            Rule("enc.last", type="Linear", input=None),
        )
    )
    roles, accumulator, matched = spec.resolve("enc.0", ("Linear", "Module"), "linear")
    assert roles == {Role.INPUT: Precision(E4M3), Role.WEIGHT: Precision(E5M2)}
    assert accumulator is None and matched == (0, 1)
    assert spec.resolve("enc.last", ("Linear",), "linear")[0] == {Role.WEIGHT: Precision(E5M2)}
    assert spec.resolve("enc.last", ("Other",), "linear")[2] == (0, 1)
    # A rule without ops reaches those that have one of its roles.
    assert spec.resolve("enc.0", (), "embedding")[0] == {Role.WEIGHT: Precision(E5M2)}
    assert not spec.resolve("enc.0", (), "add")[0]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_presets_survive_a_file(name, suffix, tmp_path):
    spec = SimulationSpec.preset(name, seed=7)
    spec.save(tmp_path / f"spec{suffix}")
    back = SimulationSpec.load(tmp_path / f"spec{suffix}")
    assert back == spec and back.name == name and back.seed == 7


def test_every_field_survives(tmp_path):
    rule = Rule(
        "a.*", type=("Linear", "Conv2d"), op=("linear", "conv2d"), optional=True,
        input=Precision(FixedPoint(8, 6), "TO_ODD", backward="mask"),
        grad_output=Precision("E5M2", "STOCHASTIC", random_bits=9),
        output=None,
        accumulator=Accumulator("DLFLOAT16", product="FP16", chunk=64, outer="FP16",
                                rounding=Rounding.TOWARD_ZERO),
    )  # fmt: skip
    spec = SimulationSpec(rule)
    spec.save(tmp_path / "s.toml")
    assert SimulationSpec.load(tmp_path / "s.toml") == spec
    assert SimulationSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_on_a_net(name):
    torch.manual_seed(0)
    model, x = nets.ConvNet(), torch.randn(2, 3, 6, 6)
    plain = model(x)
    with simulate(model, SimulationSpec.preset(name, seed=0)) as handle:
        y = model(x)
        y.sum().backward()
    assert not torch.equal(y, plain) and torch.isfinite(y).all()
    assert {s.op for s in handle.sites} >= {"conv2d", "linear"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule(op="linaer", input="E4M3"), "unknown operation 'linaer'. Valid: add, bmm"),
        (lambda: Rule(inptu="E4M3"), "unknown role in the rule for .* 'inptu'.*grad_input"),
        (lambda: Rule(op="linear"), "names no role"),
        (lambda: Rule("l1", op="embedding", input="E4M3"), "'l1' .*'input', a role that emb"),
        (lambda: Rule(input="E4M9"), "'E4M9' is not a format"),
        (lambda: Rule(input=3), "format=3 is not a format"),
        (lambda: Rule(input=Accumulator("FP16")), "role 'input' takes a Precision"),
        (lambda: Rule(accumulator="FP16"), "role 'accumulator' takes an Accumulator"),
        (lambda: Precision("E4M3", "STOCHASTICALLY"), "unknown rounding .* Valid: DOWNWARD"),
        (lambda: Precision("E4M3", backward="maks"), "backward='maks' is not valid"),
        (lambda: Precision("E4M3", random_bits=0), "random_bits=0"),
        (lambda: SimulationSpec(()), "at least one Rule"),
        (lambda: SimulationSpec.preset("fp9"), "unknown preset 'fp9'. Valid: bf16"),
        (lambda: Accumulator("FP16", chunk=0), "chunk=0 must be a positive"),
        (lambda: Accumulator("MXFP4"), "must be a FloatingPoint or a FixedPoint"),
        (lambda: Accumulator("FP16", rounding="STOCHASTIC"), "deterministic"),
        (lambda: SimulationSpec.from_dict({"rules": []}), "unknown key .* 'rules'. Valid: name"),
        (lambda: SimulationSpec.from_dict({"rule": [{"input": {"fromat": "E4M3"}}]}),
         "unknown key of role 'input' 'fromat'"),
        (lambda: SimulationSpec.load("/nowhere/x.toml"), "cannot be read"),
        (lambda: SimulationSpec.load("x.yaml"), "must end in .toml or .json"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("text", ["rule = 3", "rule = [", "[[rule]]\nmodule = 'a'\ninput = {}"])
def test_a_broken_file_is_refused(text, tmp_path):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ConfigError):
        SimulationSpec.load(tmp_path / "s.toml")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("frist", input="E4M3"), "no module is named like 'frist'. Nearest: 'first'"),
        (Rule("first", type="Conv3d", input="E4M3"), "is a Conv3d. Nearest: 'Conv2d'"),
    ],
)
def test_a_rule_for_no_module_is_refused_at_once(rule, message):
    with pytest.raises(ConfigError, match=message):
        simulate(nets.ConvNet(), SimulationSpec(rule))


def test_a_rule_for_no_operation_is_refused_after_a_pass():
    model = nets.ConvNet()
    spec = SimulationSpec(Rule("first", op="linear", input="E4M3"))
    message = r"no linear ran in the modules.*Nearest: 'conv2d'"
    with pytest.raises(ConfigError, match=message), simulate(model, spec):
        model(torch.randn(1, 3, 6, 6))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_operations_have_roles():
    assert all(roles for roles in OPERATIONS.values())
    assert Role.ACCUMULATOR in OPERATIONS["conv2d"] and Role.INPUT not in OPERATIONS["embedding"]
