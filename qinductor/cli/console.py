"""What all commands share: quiet libraries, exit code 2 for errors, JSON, progress, whole files."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

EXIT_ERROR = 2
"""Exit code of every command that was given something it cannot use (as for a wrong option)."""


def stderr() -> Console:
    """Console for progress and errors; standard output is kept for results."""
    return Console(stderr=True)


def quiet_libraries() -> None:
    """Keep the chatter of libraries out of a command's output; errors still show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    # Our own warnings are for the user.
    warnings.filterwarnings("default", message=".*this package.*")
    for name in ("torch", "torchao", "transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # torchao names its optional GPU libraries on the root logger when they cannot load.
    logging.getLogger().setLevel(logging.ERROR)


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Turn errors that a user can mend into one message on stderr and exit code 2."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        from ..errors import QInductorError

        quiet_libraries()
        try:
            return function(*args, **kwargs)
        except (QInductorError, OSError) as error:
            fail(str(error))

    return wrapped


def fail(message: str) -> NoReturn:
    """Print ``error: message`` and leave with exit code 2.

    Raises:
        typer.Exit: always.
    """
    stderr().print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_ERROR)


def require_compiler() -> None:
    """Refuse to start something that has to compile where nothing can.

    Raises:
        CompilerMissingError: there is no C++ compiler.
    """
    from ..capability import cpp_compiler
    from ..errors import CompilerMissingError

    if cpp_compiler() is None:
        raise CompilerMissingError(
            "no C++ compiler was found, so nothing can be compiled. Install one (Debian, Ubuntu: "
            "apt install g++), or set CXX to its path. Without one, int8 models run uncompiled."
        )


def print_json(value: Any) -> None:
    """Write ``value`` as JSON to standard output, without colours."""
    typer.echo(json.dumps(value, indent=2))


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table; columns after the first are right-aligned where they hold numbers."""
    body = [[str(cell) for cell in row] for row in rows]
    console = Console()
    if not console.is_terminal:
        # In a file or a pipe nothing has to be squeezed into 80 columns.
        console = Console(width=240)
    shown = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        numeric = all(_looks_numeric(row[index]) for row in body)
        shown.add_column(column, justify="right" if index and body and numeric else "left")
    for row in body:
        shown.add_row(*row)
    console.print(shown, markup=False, highlight=False)


def _looks_numeric(cell: str) -> bool:
    # A peer that is missing has no figures, and its column stays one of figures.
    return cell == "missing" or cell.strip("-+.,%×0123456789 eEmsGBMiKk/±") == ""


@contextlib.contextmanager
def progress(enabled: bool = True) -> Iterator[Progress]:
    """Progress bars on stderr; nothing where it is not a terminal or ``enabled`` is false."""
    console = stderr()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (enabled and console.is_terminal),
    ) as bars:
        yield bars


def refuse_existing(path: Path, what: str) -> None:
    """Refuse to write over ``path``, before any work is done.

    Raises:
        OSError: it exists, or its parent does not.
    """
    if path.exists() or path.is_symlink():
        raise OSError(f"{what} {str(path)!r} exists. Name another one, or remove it first.")
    refuse_missing_parent(path, what)


def refuse_missing_parent(path: Path, what: str) -> None:
    """Refuse a target whose folder is not there or cannot be written, before any work is done.

    Raises:
        OSError: see above.
    """
    parent = path.absolute().parent
    if not parent.is_dir():
        raise OSError(f"the folder {str(parent)!r} of the {what} does not exist. Create it first.")
    if path.is_dir() or not os.access(parent, os.W_OK):
        raise OSError(f"the {what} {str(path)!r} cannot be written there. Name another place.")


def refuse_bad_targets(json_file: Path | None, chart: Path | None) -> None:
    """Refuse --json and --plot files that cannot be written, before any work is done.

    Raises:
        OSError: see :func:`refuse_missing_parent`; ``-`` as JSON file stands for standard output.
        ConfigError: the chart is to be something other than a PNG file.
    """
    from ..errors import ConfigError

    for path, what in ((json_file, "JSON file"), (chart, "chart")):
        if path is not None and path != Path("-"):
            refuse_missing_parent(path, what)
    if chart is not None and chart.suffix.lower() != ".png":
        raise ConfigError(f"--plot {str(chart)!r}: charts are PNG files; name it *.png.")


@contextlib.contextmanager
def written_file(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` with its suffix; renamed to it when the block ends well."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=".", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private; a result is an ordinary file.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Yield a path for a new folder beside ``path``; renamed to it when the block ends well.

    Raises:
        OSError: ``path`` exists by then.
    """
    holder = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))
    try:
        yield holder / path.name
        refuse_existing(path, "output directory")
        (holder / path.name).rename(path)
    finally:
        shutil.rmtree(holder, ignore_errors=True)
