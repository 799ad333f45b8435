"""What every Triton kernel compiles to: `python -m qinductor.bench.gpu_table [--check]`.

Needs no GPU. Writes the table into docs/gpu.md, between its two markers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

BEGIN, END = "<!-- kernels -->", "<!-- end of kernels -->"
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"
HEAD = (
    "| kernel | target | registers | shared memory | spilled | tensor core instructions |",
    "|---|---|---|---|---|---|",
)


def rows() -> Iterator[str]:
    """Compile everything in the catalog; one line of the table each."""
    from ..templates.triton.catalog import KERNELS

    for kernel in KERNELS:
        for sm in kernel.targets:
            code = kernel.compile(sm)
            yield (
                f"| {kernel.name} | {code.target} | {code.registers} | {code.shared_bytes} B | "
                f"{code.stack_bytes} B | {code.instruction_class} |"
            )


def with_table(text: str, table: str) -> str:
    """``text`` with what stands between its markers replaced.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END} in the text: put them where the table belongs.")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if it is outdated")
    options = parser.parse_args(arguments)
    import triton

    text = DOCUMENT.read_text(encoding="utf-8")
    note = f"Compiled by Triton {triton.__version__} and the assembler it brings."
    new = with_table(text, "\n".join([note, "", *HEAD, *rows()]))
    if options.check:
        return int(new != text)
    DOCUMENT.write_text(new, encoding="utf-8")
    print(f"wrote {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
