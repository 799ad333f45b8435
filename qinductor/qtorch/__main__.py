"""``python -m qinductor.qtorch SCRIPT [ARGUMENTS]``: run a script written for QPyTorch."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from qinductor.qtorch import install


def main() -> None:
    """Run the script as ``python SCRIPT`` would, with ``import qtorch`` served by this package."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if not Path(script).exists():
        print(f"error: there is no script {script!r}. {__doc__}", file=sys.stderr)
        raise SystemExit(2)
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
