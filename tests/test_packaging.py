"""What is installed: the entry point, the linked folders, the templates' sources, the pins."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python(code: str) -> str:
    """Run ``code`` in a fresh interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_torch_finds_the_backend_without_importing_the_package() -> None:
    code = (
        "import sys, torch._dynamo\n"
        "print('qsim' in torch._dynamo.list_backends(), 'qinductor' in sys.modules)"
    )
    assert python(code) == "True False"


def test_importing_the_package_imports_no_compiler() -> None:
    code = (
        "import sys, qinductor\n"
        "print([m for m in sys.modules if m.startswith(('torch._inductor', 'torchao'))])"
    )
    assert python(code) == "[]"


@pytest.mark.parametrize("name", ["passes", "templates", "bench"])
def test_linked_folders_are_links_within_the_checkout(name: str) -> None:
    link = ROOT / "qinductor" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names inside a wheel, built from a copy: setuptools leaves build folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "-w", str(folder), str(copy),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_a_wheel_holds_every_source_as_a_real_file(wheel: set[str]) -> None:
    expected = {"qinductor/py.typed"}
    for folder in ("qinductor", "passes", "templates", "bench"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".jinja") and "__pycache__" not in path.parts:
                inside = path.relative_to(ROOT)
                linked = inside.parts[0] == "qinductor" and inside.parts[1] in (
                    "passes",
                    "templates",
                    "bench",
                )
                if not linked:
                    home = inside if folder == "qinductor" else Path("qinductor") / inside
                    expected.add(str(home))
    assert expected <= wheel
    assert any(name.endswith(".h") for name in wheel)
    assert not [
        name for name in wheel if name.startswith(("passes/", "templates/", "tests/", "bench/"))
    ]


def test_the_version_is_one() -> None:
    import qinductor

    assert importlib.metadata.version("qinductor") == qinductor.__version__
    assert f"## [{qinductor.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {
        re.split(r"[=; ]", line)[0].lower().replace("_", "-")
        for line in lines
        if line[:1].isalnum()
    }
    asked = set()
    for requirement in importlib.metadata.requires("qinductor") or []:
        asked.add(re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("_", "-"))
    assert asked <= pins
    assert all(
        re.fullmatch(r"[\w.-]+==[\w.]+(; python_version >= \"3\.\d+\")?", line)
        for line in lines
        if line[:1].isalnum()
    )


def test_no_project_file_names_a_registry() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        content = (ROOT / name).read_text("utf-8")
        assert not re.search(r"https?://|index-url|find-links", content), name
