"""English text to calibrate and evaluate with: known data sets, the user's files, and a fallback.

Known data sets are read where they stand: in the folder that the environment variable
``QINDUCTOR_DATA`` names, else in ``shared/data`` beside the checkout. A machine that has neither
still has prose: the language reference that ships with Python itself (``pydoc_data.topics``).
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CalibrationError

TEXT_COLUMNS = ("text", "sentence", "sentence1", "sentence2", "question", "query", "content")
"""Names under which a .csv header or a .jsonl object holds text."""

SUFFIXES = (".csv", ".txt", ".jsonl")
SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Corpus:
    """Texts and where they came from. ``texts`` is never empty."""

    name: str
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.texts:
            raise CalibrationError(
                f"{self.name} holds no text. Give a file with at least one non-empty line or cell."
            )

    def first(self, count: int) -> Corpus:
        """Return the first ``count`` texts (all of them where there are fewer)."""
        if count < 1:
            raise CalibrationError(f"{count} texts were asked for; at least 1 is needed.")
        return Corpus(self.name, self.texts[:count])


def data_folder() -> Path | None:
    """Folder that holds the known data sets, or None where it is absent.

    Raises:
        CalibrationError: ``QINDUCTOR_DATA`` names something that is not a folder.
    """
    named = os.environ.get("QINDUCTOR_DATA")
    if named:
        if not Path(named).is_dir():
            raise CalibrationError(
                f"QINDUCTOR_DATA={named!r} is not a folder. Unset it or mend it."
            )
        return Path(named)
    beside = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    return beside if beside.is_dir() else None


def _data_file(*parts: str) -> Path:
    folder = data_folder()
    path = folder.joinpath(*parts) if folder else None
    if path is None or not path.is_file():
        raise CalibrationError(
            f"the data set file {'/'.join(parts)} is not here. Set QINDUCTOR_DATA to a folder that "
            "has it, name a file of your own, or use 'prose', which needs no data."
        )
    return path


def has_dataset(name: str) -> bool:
    """Tell whether the known data set ``name`` ("stsb", "banking77", "xquad") can be read."""
    folder = data_folder()
    return folder is not None and (folder / name).is_dir()


def stsb(split: str) -> list[tuple[str, str, float]]:
    """Return STS-B's (sentence 1, sentence 2, score 0 to 5) rows of "train", "dev" or "test".

    Raises:
        CalibrationError: the data is absent, or ``split`` is not one of the three.
    """
    if split not in SPLITS:
        raise CalibrationError(f"unknown split {split!r}. Valid: {', '.join(SPLITS)}.")
    with _data_file("stsb", f"stsb-en-{split}.csv").open(encoding="utf-8", newline="") as file:
        return [(a, b, float(score)) for a, b, score in csv.reader(file)]


def banking77(split: str) -> tuple[list[str], list[str]]:
    """Return Banking77's texts and intents of "train" or "test".

    Raises:
        CalibrationError: the data is absent, or ``split`` is neither.
    """
    if split not in ("train", "test"):
        raise CalibrationError(f"unknown split {split!r}. Valid: train, test.")
    with _data_file("banking77", f"{split}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["category"] for row in rows]


def xquad() -> list[str]:
    """Return XQuAD's English paragraphs (long texts, about 150 tokens).

    Raises:
        CalibrationError: the data is absent.
    """
    with _data_file("xquad", "xquad.en.json").open(encoding="utf-8") as file:
        articles = json.load(file)["data"]
    return [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]


def prose() -> list[str]:
    """Return English sentences of the language reference that every Python carries."""
    from pydoc_data import topics

    found: list[str] = []
    for name in sorted(topics.topics):
        for block in re.split(r"\n\s*\n", topics.topics[name]):
            # Grammar, code and tables are indented further or full of symbols; prose is neither.
            flat = re.sub(r"[*\"|`]", "", " ".join(block.split()))
            for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", flat):
                if 6 <= len(sentence.split()) <= 60 and re.fullmatch(
                    r"[A-Z][\w\s,.'();:-]+\.", sentence
                ):
                    found.append(sentence)
    return list(dict.fromkeys(found))


def _stsb_train_sentences() -> list[str]:
    return [sentence for first, second, _ in stsb("train") for sentence in (first, second)]


NAMED: dict[str, Callable[[], list[str]]] = {
    "stsb": _stsb_train_sentences,
    "banking77": lambda: banking77("train")[0],
    "xquad": xquad,
    "prose": prose,
}


def _rows_of_csv(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    if not rows:
        return []
    header = [cell.strip().lower() for cell in rows[0]]
    columns = [i for i, name in enumerate(header) if name in TEXT_COLUMNS]
    if columns:
        rows = rows[1:]
    else:
        # No header that is known: text is what has more than one word in most of its cells.
        columns = [
            i for i in range(len(header)) if _is_text([row[i] for row in rows if i < len(row)])
        ]
        if not columns:
            raise CalibrationError(
                f"{path}: no column holds text. Name it in a header line (one of "
                f"{', '.join(TEXT_COLUMNS)})."
            )
    return [row[i].strip() for row in rows for i in columns if i < len(row) and row[i].strip()]


def _is_text(cells: Sequence[str]) -> bool:
    return 2 * sum(len(cell.split()) > 1 for cell in cells) > len(cells)


def _rows_of_jsonl(path: Path) -> list[str]:
    found: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CalibrationError(f"{path}, line {number}: not JSON ({error.msg}).") from None
        values = [row] if isinstance(row, str) else []
        if isinstance(row, dict):
            values = [row[key] for key in TEXT_COLUMNS if isinstance(row.get(key), str)]
        if not values:
            raise CalibrationError(
                f"{path}, line {number}: neither a string nor an object with one of the keys "
                f"{', '.join(TEXT_COLUMNS)}."
            )
        found += [value.strip() for value in values if value.strip()]
    return found


def read_file(path: Path) -> Corpus:
    """Read the texts of a .csv, .txt (one text a line) or .jsonl file.

    Raises:
        CalibrationError: the file is missing, of another kind, not UTF-8, or holds no text.
    """
    if not path.is_file():
        raise CalibrationError(
            f"no calibration file {str(path)!r}. Give a {', '.join(SUFFIXES)} file, or one of the "
            f"names {', '.join(NAMED)}."
        )
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise CalibrationError(
            f"{path}: {suffix or 'no suffix'!r} is not one of {', '.join(SUFFIXES)}."
        )
    try:
        if suffix == ".csv":
            texts = _rows_of_csv(path)
        elif suffix == ".jsonl":
            texts = _rows_of_jsonl(path)
        else:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            texts = [line.strip() for line in lines if line.strip()]
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text (byte {error.start}).") from None
    except csv.Error as error:
        raise CalibrationError(f"{path} is not a CSV file ({error}).") from None
    return Corpus(str(path), tuple(texts))


def corpus(source: str | None = None) -> Corpus:
    """Return the texts that ``source`` names: a data set, a file, or (None) the best there is.

    Without a name that is STS-B's training sentences where the data stands, else the prose.

    Raises:
        CalibrationError: see :func:`read_file`; or the named data set is absent.
    """
    if source is None:
        source = "stsb" if has_dataset("stsb") else "prose"
    if source in NAMED:
        return Corpus(source, tuple(NAMED[source]()))
    return read_file(Path(source))
