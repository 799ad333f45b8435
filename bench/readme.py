"""Write the documents' tables from bench/results: ``python -m qinductor.bench.readme``.

No figure in such a table is typed. A block ``<!-- table: NAME -->`` ... ``<!-- end -->`` holds what
results/NAME.json says.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from . import machine
from .models import RESULTS
from .tables import text_table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def markdown(result: dict[str, Any]) -> str:
    """A result as a Markdown table under a line that names the machine."""
    columns, rows = text_table(result)
    lines = [
        machine.describe(result["machine"]) + ":",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---" if i in (0, 1, 2) else "---:" for i in range(len(columns))) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    lines += [
        f"\n{e['variant']} at {e['batch']}×{e['seq']} did not run: {e['error']}"
        for e in result["errors"]
    ]
    lines += [f"\n{absent['reason']}" for absent in result.get("missing", ())]
    return "\n".join(lines) + "\n"


def filled(text: str, results: Path = RESULTS) -> str:
    """Return ``text`` with every block that has a result file filled in; others are left."""

    def block(match: re.Match[str]) -> str:
        path = results / f"{match[2]}.json"
        if not path.is_file():
            return match[0]
        return match[1] + markdown(json.loads(path.read_text(encoding="utf-8"))) + match[4]

    return _BLOCK.sub(block, text)


def main() -> int:
    """Rewrite the documents; returns the exit code."""
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
