"""Where text comes from: files of three kinds, known data sets, Python's own prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from qinductor import text
from qinductor.errors import CalibrationError


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_txt_is_one_text_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "first line\n\n  second line \n")
    assert text.read_file(path).texts == ("first line", "second line")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # A known header: only that column.
        ("text,category\nI lost my card,lost_card\n", ("I lost my card",)),
        ("id,sentence1,sentence2\n7,one thing,another thing\n", ("one thing", "another thing")),
        # No header: the columns that hold more than one word (STS-B's own layout).
        ("A girl runs.,A boy runs.,2.5\nTwo dogs.,A cat sits.,0.0\n",
         ("A girl runs.", "A boy runs.", "Two dogs.", "A cat sits.")),
        # A comma inside quotes, a byte order mark, an empty row.
        ('\ufefftext\n"yes, it is"\n\n', ("yes, it is",)),
    ],
)  # fmt: skip
def test_csv_columns(tmp_path: Path, content: str, expected: tuple[str, ...]) -> None:
    assert text.read_file(write(tmp_path, "a.csv", content)).texts == expected


def test_jsonl_strings_and_objects(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '"plain"\n{"question": "why?", "id": 3}\n\n')
    assert text.read_file(path).texts == ("plain", "why?")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "1,2\n3,4\n", "no column holds text"),
        ("a.jsonl", '{"text": "fine"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", '{"label": 3}\n', "line 1: neither a string nor"),
        ("a.txt", "\n \n", "holds no text"),
        ("a.csv", "", "holds no text"),
        ("a.pdf", "text", "'.pdf' is not one of .csv, .txt, .jsonl"),
        ("a", "text", "'no suffix' is not one of"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(CalibrationError, match=message) as error:
        text.read_file(path)
    assert str(path) in str(error.value)


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(CalibrationError, match=r"not UTF-8 text \(byte 3\)"):
        text.read_file(path)


def test_a_missing_file_names_the_data_sets(tmp_path: Path) -> None:
    with pytest.raises(
        CalibrationError, match=r"no calibration file .*stsb, banking77, xquad, prose"
    ):
        text.corpus(str(tmp_path / "none.csv"))


def test_prose_needs_nothing_but_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QINDUCTOR_DATA", str(tmp_path))  # an empty folder: no data set
    corpus = text.corpus()
    assert corpus.name == "prose"
    assert len(corpus.texts) > 1000
    assert len(set(corpus.texts)) == len(corpus.texts)
    assert all(6 <= len(sentence.split()) <= 60 for sentence in corpus.texts)


def test_data_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "stsb").mkdir()
    write(tmp_path / "stsb", "stsb-en-train.csv", "a b,c d,1.0\n")
    monkeypatch.setenv("QINDUCTOR_DATA", str(tmp_path))
    assert text.corpus().name == "stsb"
    assert text.corpus().texts == ("a b", "c d")
    with pytest.raises(CalibrationError, match=r"banking77/train.csv is not here"):
        text.corpus("banking77")
    monkeypatch.setenv("QINDUCTOR_DATA", str(tmp_path / "gone"))
    with pytest.raises(CalibrationError, match="is not a folder"):
        text.data_folder()


def test_counts_and_splits_are_checked(data_dir: Path) -> None:
    with pytest.raises(CalibrationError, match="0 texts were asked for"):
        text.corpus("prose").first(0)
    with pytest.raises(CalibrationError, match="Valid: train, dev, test"):
        text.stsb("validation")
    with pytest.raises(CalibrationError, match="Valid: train, test"):
        text.banking77("dev")


def test_the_known_data_sets(data_dir: Path) -> None:
    assert [len(text.stsb(split)) for split in text.SPLITS] == [5749, 1500, 1379]
    texts, labels = text.banking77("test")
    assert (len(texts), len(labels), len(set(labels))) == (3080, 3080, 77)
    assert len(text.xquad()) == 240
