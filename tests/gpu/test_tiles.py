"""Tiles: valid sizes, what fits a GPU, which one a problem gets; and what a GPU can do."""

from __future__ import annotations

import pytest

from qinductor.capability import Capability, Gpu
from qinductor.errors import ConfigError
from qinductor.templates.base import GpuImplementation
from qinductor.templates.triton.tiles import Epilogue, Tile, candidates, choose_tile

GPUS = [Gpu(sm, processors=108) for sm in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": 48}, "tile m=48 is not valid. Valid: powers of two from 16 to 256"),
        ({"n": 8}, "tile n=8"),
        ({"k": 1024}, "tile k=1024"),
        ({"warps": 3}, "tile warps=3"),
        ({"stages": 0}, "tile stages=0 is not valid. Valid: 1 to 8"),
        ({"splits": 129}, "tile splits=129"),
    ],
    ids=str,
)
def test_sizes_that_no_kernel_can_have_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tile(**{"m": 64, "n": 64, "k": 64, "warps": 4, "stages": 2, **change})


def test_a_tile_that_needs_too_much_shared_memory_is_refused() -> None:
    tile = Tile(128, 256, 128, warps=8, stages=3)
    assert tile.check(Gpu((9, 0))) is tile
    with pytest.raises(ConfigError, match="147456 bytes of shared memory, sm_86 has 101376"):
        tile.check(Gpu((8, 6)))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.target)
@pytest.mark.parametrize("operands", ["s8", "fp8"])
@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.value)
def test_every_choice_fits_and_covers_k(gpu: Gpu, operands: str, epilogue: Epilogue) -> None:
    for m in (1, 16, 17, 100, 5000):
        for n in (1, 768, 4096):
            for k in (1, 64, 1000, 4096, 60000):
                problem = (m, n, k, gpu, operands, epilogue)
                first, *others = candidates(*problem)
                assert first == choose_tile(*problem)
                for tile in (first, *others):
                    assert tile.shared_bytes <= gpu.shared_bytes
                    assert tile.splits == first.splits
                    assert tile.split_size(k) * tile.splits >= k
                assert first.split_size(k) * (first.splits - 1) < k, "every split has work"
                assert operands == "s8" or first.splits == 1


def test_few_rows_get_small_tiles_and_many_splits() -> None:
    gpu = Gpu((9, 0), processors=132)
    assert choose_tile(1, 1024, 4096, gpu).m == 16
    assert choose_tile(1, 1024, 4096, gpu).splits == 8
    assert choose_tile(1, 1 << 16, 4096, gpu).splits == 1, "enough blocks already"
    assert choose_tile(4096, 4096, 4096, gpu) == Tile(128, 256, 128, warps=8, stages=3)
    light, heavy = (choose_tile(4096, 4096, 4096, gpu, "s8", e) for e in list(Epilogue)[1:])
    sums_a_thread = [t.m * t.n // (32 * t.warps) for t in (light, heavy)]
    assert max(sums_a_thread) <= 32


def test_what_an_old_gpu_lacks_is_named() -> None:
    turing, ampere, ada = (Gpu(sm) for sm in ((7, 5), (8, 0), (8, 9)))
    assert turing.reason_against("s8") == "s8 products need sm_80, this GPU is sm_75"
    assert ampere.reason_against("s8") is None
    assert ampere.reason_against("fp8") == "fp8 products need sm_89, this GPU is sm_80"
    assert ada.reason_against("fp8") is None
    none = Capability((), "cpu", 1, 1, 1, 1, False, False)
    implementation = GpuImplementation("qlinear", "s8")
    assert implementation.reason_against(none) == "torch finds no CUDA device"
    assert not implementation.usable(none)
    assert repr(turing) in Capability((), "cpu", 1, 1, 1, 1, False, False, turing).cache_key()
