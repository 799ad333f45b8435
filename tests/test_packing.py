"""Weights that are packed when a graph runs: once each, and again when they change."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from qinductor import packing
from qinductor.backend import qsim
from qinductor.errors import ConfigError
from qinductor.ops import pack_weight
from qinductor.packing import PACKED, StorageCache

sys.path.insert(0, str(Path(__file__).parent / "passes"))
import foreign

packed_of = torch.ops.qinductor.packed_of.default


def _weight(n: int = 70, k: int = 30, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)


class _Counting:
    """A cache that counts how often it computed."""

    def __init__(self, delay: float = 0.0) -> None:
        self.computed = 0
        self.delay = delay
        self.cache = StorageCache(self._compute)

    def _compute(self, tensor: Tensor) -> Tensor:
        self.computed += 1
        time.sleep(self.delay)
        return tensor.clone()


# ---------------------------------------------------------------- the cache


def test_operator_gives_packed_weights_and_sums() -> None:
    a, b = _weight(), _weight(64, 128, seed=1)
    got = packed_of([a, b], [])
    assert [t.dtype for t in got] == [torch.int8, torch.int32] * 2
    for weight, packed, w_sum in ((a, *got[:2]), (b, *got[2:])):
        assert torch.equal(packed, pack_weight(weight))
        assert torch.equal(w_sum, weight.int().sum(1, dtype=torch.int32))
    again = packed_of([a, b], [])
    assert all(x is y or x.data_ptr() == y.data_ptr() for x, y in zip(got, again, strict=True))
    torch.library.opcheck(packed_of, ([a, b], []))


def test_a_transposed_weight_is_packed_by_its_values() -> None:
    weight = _weight(30, 70).t()
    assert torch.equal(packed_of([weight], [])[0], pack_weight(weight.contiguous()))


def test_computed_once_for_all_views_of_the_same_place() -> None:
    counting, weight = _Counting(), _weight()
    first = counting.cache.of(weight)
    assert counting.cache.of(weight) is first
    assert counting.cache.of(weight.view(70, 30)) is first
    assert counting.computed == 1
    assert counting.cache.of(weight[:64]) is not first
    assert counting.cache.of(weight.t()).shape == (30, 70)
    assert counting.computed == 3


@pytest.mark.parametrize("through", ["itself", "view", "inference_mode"])
def test_a_write_is_seen(through: str) -> None:
    counting, weight = _Counting(), _weight()
    counting.cache.of(weight)
    if through == "itself":
        weight.neg_()
    elif through == "view":
        weight.view(-1)[0:1].fill_(int(weight[0, 0]) ^ 1)
    else:
        with torch.inference_mode():
            weight.zero_()
    assert torch.equal(counting.cache.of(weight), weight)
    assert counting.computed == 2
    assert len(counting.cache) == 1


def test_another_storage_is_seen() -> None:
    counting, weight = _Counting(), _weight()
    counting.cache.of(weight)
    weight.set_(_weight(seed=5))  # type: ignore[call-overload]
    assert torch.equal(counting.cache.of(weight), weight)
    weight.data = _weight(seed=6)
    assert torch.equal(counting.cache.of(weight), weight)
    gc.collect()
    assert len(counting.cache) == 1


def test_a_dead_weight_is_forgotten_and_its_address_means_nothing() -> None:
    counting = _Counting()
    for seed in range(50):  # the allocator hands the same memory out again
        weight = _weight(seed=seed)
        assert torch.equal(counting.cache.of(weight), weight)
        del weight
    gc.collect()
    assert len(counting.cache) == 0
    assert counting.computed == 50


def test_a_view_keeps_the_entry_of_its_storage() -> None:
    counting, weight = _Counting(), _weight()
    view = weight.view(-1)
    counting.cache.of(weight)
    del weight
    gc.collect()
    assert len(counting.cache) == 1
    del view
    gc.collect()
    assert len(counting.cache) == 0


def test_threads_compute_once() -> None:
    counting, weight = _Counting(delay=0.05), _weight()
    results: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(counting.cache.of(weight))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.computed == 1
    assert len(results) == 8
    assert all(r is results[0] for r in results)


def test_inference_tensor_is_packed_in_every_call_and_says_so() -> None:
    """It has no version counter, so a kept result could be wrong."""
    with torch.inference_mode():
        weight = _weight()
    with pytest.warns(UserWarning, match="inference_mode"):
        packed, _ = packed_of([weight], [])
    assert not packed.is_inference()
    with torch.inference_mode():
        weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not packed_of([weight], [])[0].any()


def test_result_made_under_inference_mode_is_an_ordinary_tensor() -> None:
    weight = _weight()
    with torch.inference_mode():
        packed_of([weight], [])
    packed, w_sum = packed_of([weight], [])
    assert not packed.is_inference()
    assert not w_sum.is_inference()


def test_zero_points_must_be_zero() -> None:
    weight = _weight()
    zero_point = torch.zeros(70, dtype=torch.int64)
    packed_of([weight], [zero_point])
    zero_point[3] = -5
    with pytest.raises(ConfigError, match=r"zero point -5.*disable"):
        packed_of([weight], [zero_point])


# ---------------------------------------------------------------- compiled models


def test_one_graph_two_models_each_with_its_own_weights() -> None:
    x = foreign.inputs(2, 3, 64)
    one, two = (foreign.torchao_model(foreign.mlp(seed=seed), x, static=True) for seed in (0, 1))
    torch._dynamo.reset()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    compiled = torch.compile(run, backend=qsim, dynamic=True)
    with torch.no_grad():
        before = counters["stats"]["unique_graphs"]
        for model in (one, two, one):
            assert torch.equal(compiled(model, x), model(x))
        assert counters["stats"]["unique_graphs"] == before + 1
    assert not torch.equal(one[0].weight.qdata, two[0].weight.qdata)


def test_compiled_model_packs_once_and_follows_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = foreign.inputs(2, 3, 64)
    model = foreign.torchao_model(foreign.mlp(), x, static=True)
    packs: list[tuple[int, ...]] = []

    def counting(weight: Tensor) -> tuple[Tensor, Tensor]:
        packs.append(tuple(weight.shape))
        return packing._pack(weight)

    monkeypatch.setattr(PACKED, "_compute", counting)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=qsim, dynamic=True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x), model(x))
        assert packs == [(96, 64), (64, 96)]
        model[0].weight.qdata.neg_()
        assert torch.equal(compiled(x), model(x))
        assert packs[2:] == [(96, 64)]
        other = foreign.torchao_model(foreign.mlp(seed=1), x, static=True)
        model[2].weight = other[2].weight
        assert torch.equal(compiled(x), model(x))
        assert packs[3:] == [(64, 96)]
        # Inductor reuses the memory of its own buffers, but not of these.
        for layer in (model[0], model[2]):
            packed, w_sum = PACKED.of(layer.weight.qdata)
            assert torch.equal(packed, pack_weight(layer.weight.qdata))
            assert torch.equal(w_sum, layer.weight.qdata.sum(1, dtype=torch.int32))
        assert len(packs) == 4


def test_packed_weights_die_with_their_model() -> None:
    x = foreign.inputs(2, 3, 64)
    gc.collect()
    before = len(PACKED)
    model = foreign.torchao_model(foreign.mlp(seed=2), x, static=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=qsim, dynamic=True)
    with torch.no_grad():
        compiled(x)
    assert len(PACKED) == before + 2
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert len(PACKED) == before
