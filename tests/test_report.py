"""explain(): before, after, for modules, functions, layers and other modules of a class."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_nets import Feedforward, int8_linear
from torch import Tensor, nn

import qinductor
from qinductor.backend import qsim
from qinductor.errors import ConfigError
from qinductor.passes.base import Entry
from qinductor.report import GraphRecord, read_entries, store_entries


class Net(nn.Module):
    """Two int8 linears and a float one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Feedforward()
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _statuses(report: qinductor.Report) -> dict[str, str]:
    return {linear.site: linear.status for linear in report.linears}


def test_before_the_first_call() -> None:
    report = qinductor.explain(torch.compile(Net(), backend=qsim))
    assert report.to_dict()["compiled"] is False
    assert report.counts() == {"total": 3, "int8": 2, "simulated": 0, "kept": 1}
    text = str(report)
    assert "Nothing is compiled yet: call the compiled model once" in text
    assert "not compiled yet" in text


def test_after_calls() -> None:
    net = Net()
    compiled = torch.compile(net, backend=qsim)
    x = torch.randn(3, 64)
    for _ in range(3):
        compiled(x)
    report = qinductor.explain(compiled)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["compiled"] is True
    assert found["linears"] == {"total": 3, "int8": 2, "simulated": 0, "kept": 1}
    assert _statuses(report) == {"body.up": "int8", "body.down": "int8", "head": "kept"}
    (graph,) = found["graphs"]
    assert graph["calls"] == 3 and graph["int8_kernels"] == 2 and graph["graph_break"] is None
    (kept,) = [site for site in found["sites"] if site["status"] == "kept"]
    assert kept["detail"]
    assert {r["rule"] for r in found["rewrites"]} >= {"fuse_activation", "fuse_residual"}
    assert {r["site"] for r in found["rewrites"]} == {"body.up", "body.down"}
    text = str(report)
    for expected in ("linears: 3 = 2 int8", "body.up", "u8_s8_qlinear__", "the model ends"):
        assert expected in text
    # the module itself is as good as what torch.compile made of it
    assert qinductor.explain(net) == report


def test_refusals_are_reported() -> None:
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = int8_linear(64, 64)
            self.register_buffer("row", torch.randn(64))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.row

    compiled = torch.compile(Row(), backend=qsim)
    compiled(torch.randn(3, 64))
    (refusal,) = qinductor.explain(compiled).to_dict()["refusals"]
    assert refusal["rule"] == "fuse_residual" and refusal["site"] == "linear"
    assert "addend has shape (64,)" in refusal["detail"]


def test_graph_breaks_are_named() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = int8_linear(64, 64), int8_linear(64, 64, seed=3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    compiled = torch.compile(Broken(), backend=qsim)
    compiled(torch.randn(3, 64))
    report = qinductor.explain(compiled)
    reasons = [graph["graph_break"] for graph in report.to_dict()["graphs"]]
    assert len(reasons) == 2 and reasons[1] is None
    assert "graph_break" in reasons[0] and "test_report.py:" in reasons[0]
    assert report.counts()["int8"] == 2 and "test_report.py:" in str(report)


def test_functions_that_close_over_a_model() -> None:
    net = Feedforward()

    def function(x: Tensor) -> Tensor:
        return net(x) * factor

    compiled = torch.compile(function, backend=qsim)
    assert qinductor.explain(compiled).counts()["total"] == 2  # factor has no value yet
    factor = 2
    compiled(torch.randn(3, 64))
    report = qinductor.explain(compiled)
    assert _statuses(report) == {"up": "int8", "down": "int8"} and report.to_dict()["compiled"]


def test_methods_of_an_object_that_holds_a_model() -> None:
    class Service:
        def __init__(self) -> None:
            self.net = Feedforward()

        def embed(self, x: Tensor) -> Tensor:
            return self.net(x)

    service = Service()
    compiled = torch.compile(service.embed, backend=qsim)
    compiled(torch.randn(3, 64))
    assert qinductor.explain(compiled).counts() == {
        "total": 2,
        "int8": 2,
        "simulated": 0,
        "kept": 0,
    }


def test_a_second_model_that_dynamo_runs_in_the_first_one_s_graph() -> None:
    x = torch.randn(3, 64)
    models = [Feedforward(seed=i) for i in (0, 7)]
    for model in models:
        compiled = torch.compile(model, backend=qsim)
        compiled(x)
        report = qinductor.explain(compiled)
        assert report.counts()["int8"] == 2 and report.to_dict()["compiled"], report
    assert qinductor.explain(torch.compile(Feedforward(), backend=qsim)).graphs == ()


def test_layers_that_are_compiled_one_by_one() -> None:
    net = nn.Sequential(*(Feedforward(seed=i) for i in range(3)))
    for layer in net:
        layer.compile(backend=qsim)
    net(torch.randn(3, 64))
    report = qinductor.explain(net)
    assert report.counts() == {"total": 6, "int8": 6, "simulated": 0, "kept": 0}
    assert set(_statuses(report)) == {f"{i}.{name}" for i in range(3) for name in ("up", "down")}


def test_a_linear_in_no_graph_is_kept_with_the_reason() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = int8_linear(64, 64), int8_linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    compiled = torch.compile(Half(), backend=qsim)
    compiled(torch.randn(3, 64))
    report = qinductor.explain(compiled)
    assert _statuses(report) == {"a": "int8", "b": "kept"}
    assert "in no compiled graph" in str(report)


class Nested(nn.Module):
    """Layers at ``name`` and at ``first.name``; the int8 ones are named."""

    def __init__(self, first: str, name: str, int8: tuple[str, ...]) -> None:
        super().__init__()
        for path in (f"{first}.{name}", name):
            *inner, leaf = path.split(".")
            holder: nn.Module = self
            for part in inner:
                if not hasattr(holder, part):
                    setattr(holder, part, nn.Module())
                holder = getattr(holder, part)
            setattr(holder, leaf, int8_linear(64, 64) if path in int8 else nn.Linear(64, 64))
        self.paths = (f"{first}.{name}", name)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.get_submodule(path) for path in self.paths)
        return torch.tanh(second(torch.relu(first(x))))


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("int8", ["dense", "sub.dense"])
def test_a_float_linear_whose_name_ends_like_an_int8_one_s(int8: str, by_layer: bool) -> None:
    layer = Nested("sub", "dense", (int8,))
    net = nn.Sequential(layer) if by_layer else layer
    layer.compile(backend=qsim)
    net(torch.randn(3, 64))
    prefix = "0." if by_layer else ""
    expected = {f"{prefix}{p}": "int8" if p == int8 else "kept" for p in layer.paths}
    assert _statuses(qinductor.explain(net)) == expected


def test_a_line_goes_to_the_linear_of_exactly_that_name() -> None:
    net = Nested("attn", "output.dense", ("attn.output.dense", "output.dense"))
    net.compile(backend=qsim)
    net(torch.randn(3, 64))
    details = {linear.site: linear.detail for linear in qinductor.explain(net).linears}
    assert "relu" in details["attn.output.dense"] and "tanh" in details["output.dense"]


def test_an_int8_linear_without_an_entry_takes_no_other_one_s() -> None:
    record = GraphRecord(inputs=[], isa="avx2")
    record.add([Entry("choose_kernels", "sub.dense", "int8", "kernel")])
    assert record.named("int8", "dense", {"dense", "sub.dense"}) is None
    # Where the model was compiled, and the layer "sub" is explained.
    assert record.named("int8", "dense", {"dense"}) == "kernel"


def test_what_cannot_be_explained() -> None:
    with pytest.raises(ConfigError, match=r"was given a int.*what torch.compile\(...\) returned"):
        qinductor.explain(3)


def test_nothing_int8_is_reported_as_nothing() -> None:
    report = qinductor.explain(torch.compile(nn.ReLU(), backend=qsim))
    assert report.counts()["total"] == 0 and "linears: 0" in str(report)


def test_processes_that_store_at_once_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork has the thread identifiers of its parent; the second one writes within the first."""
    entries, path = [Entry("a_pass", "layer.0", "fused", "what")], tmp_path / "entries.json"
    replace = Path.replace

    def other_first(beside: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        child = os.fork()
        if not child:
            store_entries(path, entries)
            os._exit(0)
        os.waitpid(child, 0)
        assert beside.exists()
        return replace(beside, target)

    monkeypatch.setattr(Path, "replace", other_first)
    store_entries(path, entries)
    assert read_entries(path) == entries and list(tmp_path.iterdir()) == [path]


def test_entries_that_cannot_be_written_are_not_stored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "entries.json", tmp_path / "folder"):
        store_entries(path, [])
        assert read_entries(path) is None
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"}


def test_stored_entries(tmp_path: Any) -> None:
    entries = [Entry("a_pass", "layer.0", "fused", "what")]
    path = tmp_path / "deep" / "entries.json"
    store_entries(path, entries)
    assert read_entries(path) == entries
    assert [p.name for p in path.parent.iterdir()] == ["entries.json"]
    assert read_entries(tmp_path / "absent.json") is None
    for text in ("not json", "{}", '[{"rule": 1}]', '["x"]'):
        path.write_text(text)
        assert not read_entries(path), text
