"""``qinductor formats``: the list, one format, and what is no format."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from qinductor.cli import app
from qinductor.numerics import NAMED, parse_format


def run(*arguments: str):
    return CliRunner().invoke(app, ["formats", *arguments])


def test_the_list_has_every_named_format():
    done = run()
    assert done.exit_code == 0, done.output
    lines = {line.split("│")[1].strip(): line for line in done.output.splitlines() if "│" in line}
    assert set(lines) >= set(NAMED)
    assert "448" in lines["E4M3"] and "to NaN" in lines["DLFLOAT16"]


def test_json_is_read_back():
    rows = json.loads(run("--json").output)["formats"]
    assert [r["name"] for r in rows] == list(NAMED)
    assert all(parse_format(r["definition"]) == NAMED[r["name"]] for r in rows)
    by_name = {r["name"]: r for r in rows}
    assert by_name["E4M3"]["max"] == 448 and by_name["MXFP4"]["bits_per_value"] == 4.25
    assert by_name["INT8"]["max"] is None


def test_one_format():
    assert "448" in run("E4M3").output
    assert json.loads(run("FloatingPoint(4, 3)", "--json").output)["max"] == 240


def test_no_format():
    done = run("E9M9")
    assert done.exit_code == 2 and "E4M3" in done.output
