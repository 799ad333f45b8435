"""The GPU bench's bookkeeping, and its table of machine code; neither needs a GPU."""

from __future__ import annotations

import time

import pytest

from qinductor.bench import gpu, gpu_table


def test_rows_have_rates_ratios_and_failures() -> None:
    def fail() -> None:
        raise RuntimeError("no kernel")

    calls = {
        "base": lambda: time.sleep(0.004),
        "quick": lambda: time.sleep(0.001),
        "broken": fail,
    }
    waits: list[int] = []
    rows = {
        r.candidate: r for r in gpu.measure("q", calls, 100.0, "GB/s", wait=lambda: waits.append(1))
    }
    assert rows["base"].ratio == 1
    assert rows["quick"].ratio is not None and rows["quick"].ratio > 1.5
    assert 100 / 0.008 < rows["base"].value < 100 / 0.004
    assert rows["broken"].value is None and rows["broken"].error == "RuntimeError: no kernel"
    assert len(waits) > 10, "every call waits for the device"
    text = gpu.table(list(rows.values()))
    assert "| q | broken | RuntimeError: no kernel | - |" in text
    assert "| q | base |" in text and "GB/s | 1.00 |" in text


def test_the_encoders_are_built_alike() -> None:
    pytest.importorskip("transformers")
    calls, tokens = gpu.bert(1, 64, 2, 8, device="cpu")
    assert tokens == 16 and list(calls) == ["bf16 eager", "bf16 compiled", "int8 qsim"]
    assert calls["bf16 eager"]().shape == (2, 8, 64)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture) -> None:
    from qinductor.capability import Capability

    if Capability.detect().gpu is not None:
        pytest.skip("there is a GPU")
    assert gpu.main(["--quick"]) == 1
    assert "no CUDA device" in capsys.readouterr().out


def test_the_kernel_table_is_put_between_its_markers() -> None:
    text = gpu_table.with_table(f"a\n{gpu_table.BEGIN}\nold\n{gpu_table.END}\nb", "new")
    assert text == f"a\n{gpu_table.BEGIN}\nnew\n{gpu_table.END}\nb"
    with pytest.raises(ValueError, match="put them where the table belongs"):
        gpu_table.with_table("a", "new")


def test_the_document_lists_every_kernel_and_target() -> None:
    from qinductor.templates.triton.catalog import KERNELS

    text = gpu_table.DOCUMENT.read_text(encoding="utf-8")
    for kernel in KERNELS:
        for sm in kernel.targets:
            row = f"| {kernel.name} | sm_{sm[0]}{sm[1]} | "
            (line,) = (line for line in text.splitlines() if line.startswith(row))
            assert "| 0 B |" in line, line
