"""C++ loops over elements: loads and stores of each dtype around the printed rule."""

from __future__ import annotations

import torch

from .carrier import Carrier


def loop(carrier: Carrier, lines: list[str], result: str, random: bool, advance: str = "") -> str:
    """A function ``round_run(x, out, n, u, <grid>)``'s body: the rule over n elements."""
    u = ""
    if random:
        u = "const I u = " + ("u_[i];" if carrier.word.bits == 32 else "(int64_t)(uint32_t)u_[i];")
    load, store = {
        torch.float32: ("x[i]", f"out[i] = {result};"),
        torch.float64: ("x[i]", f"out[i] = {result};"),
        torch.bfloat16: ("(I)x[i] << 16", f"out[i] = (T)({result} >> 16);"),
        torch.float16: ("buffer[i]", f"buffer[i] = {result};"),
    }[carrier.dtype]
    body = "\n    ".join([f"const I bits = {load};", u, *lines, store])
    text = f"#pragma omp simd\n  for (int64_t i = 0; i < n; ++i) {{\n    {body}\n  }}"
    if carrier.dtype != torch.float16:
        return text
    return (
        "for (int64_t left = n; left > 0; ) {\n  const int64_t n = left < 512 ? left : 512;\n"
        "  int32_t buffer[512]; load_half(x, buffer, n);\n"
        f"  {text}\n  store_half(buffer, out, n);\n"
        f"  x += n; out += n; {'u_ += n; ' if random else ''}{advance}left -= n;\n}}"
    )
