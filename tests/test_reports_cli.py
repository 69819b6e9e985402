"""`tqtool report` and `tqtool compare` as a user runs them: outputs, files, refusals with their exit status."""

import json
import os
from pathlib import Path

import pytest
from conftest import Run
from reports import sample_report

from tqtool.rendering.report.markdown import report_markdown
from tqtool.report.serialize import report_from_json, report_to_json


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "r.json"
    path.write_text(report_to_json(sample_report()))
    return path


def test_one_measurement_many_outputs(tqtool: Run, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.md").touch()  # as CI makes its step summary: empty, so nothing is lost
    done = tqtool(
        "report", "r.json", "--format", "tsv", "--json-out", "again.json", "--markdown-out", "summary.md",
        "--html-out", "r.html", "--junit-out", "r.xml", "--tsv-out", "r.tsv",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "r.tsv").read_text()
    assert (tmp_path / "again.json").read_text() == saved.read_text()
    assert (tmp_path / "summary.md").read_text().startswith("**✗ FAIL K4/V4")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "r.xml").read_text().startswith("<?xml")
    assert done.stderr.count("wrote") == 5
    again = tqtool("report", "r.json", "--html-out", "r.html", "-q")
    assert (again.returncode, again.stdout) == (4, "")
    assert "error[exists]: r.html: already exists" in again.stderr


def test_a_step_summary_is_added_to(tqtool: Run, saved: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("# Title\n")
    env = os.environ | {"GITHUB_STEP_SUMMARY": str(summary)}
    for option in ([], ["--force"]):
        done = tqtool("report", saved, "--markdown-out", "summary.md", *option, env=env)
        assert done.returncode == 0, done.stderr
    text = summary.read_text()
    report = report_markdown(sample_report())
    assert text == f"# Title\n\n{report}\n{report}"
    other = tqtool("report", saved, "--html-out", summary, env=env)  # no Markdown: nothing to add to
    assert (other.returncode, summary.read_text()) == (4, text)


def test_a_full_step_summary_still_gets_the_verdict_and_stays_below_the_limit(
    tqtool: Run, saved: Path, tmp_path: Path
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("x" * 920_000)
    env = os.environ | {"GITHUB_STEP_SUMMARY": str(summary)}
    assert tqtool("report", saved, "--markdown-out", summary, env=env).returncode == 0
    added = summary.read_text()[920_000:]
    assert added.startswith("\n**✗ FAIL K4/V4")
    assert "Left out" in added
    assert summary.stat().st_size < 1 << 20


def test_the_plain_report_has_no_colour_and_ends_with_the_gate(tqtool: Run, saved: Path) -> None:
    done = tqtool("report", saved)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert done.stdout.rstrip("\n").split("\n")[-1].startswith("✗ Gate balanced")


def test_an_ascii_terminal_gets_ascii(tqtool: Run, saved: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = tqtool("report", saved, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_a_report_is_read_from_stdin_with_a_byte_order_mark(tqtool: Run, saved: Path) -> None:
    done = tqtool("report", "-", "--json", input="\ufeff" + saved.read_text())
    assert report_to_json(report_from_json(done.stdout)) == report_to_json(report_from_json(saved.read_text()))


@pytest.mark.parametrize(("content", "status", "message"), [
    (b"", 3, "error[empty-file]: bad.json: file is empty"),
    (b"{", 3, "error[report]: bad.json: not JSON"),
    (b"\x93NUMPY\x01\x00\xff", 3, "error[report]: bad.json: not JSON: the file is not text"),
    (b"[1, 2]", 3, "error[report]: bad.json: schema is None, expected 'tqtool.validate/1'"),
    (b'{"schema": "tqtool.compare/1"}', 3, "error[report]: bad.json: schema is 'tqtool.compare/1'"),
    (b'{"schema": "tqtool.validate/2"}', 5, "error[format-newer]: bad.json: written as tqtool.validate/2"),
    (b'{"schema": "tqtool.validate/1"}', 3, "error[report]: bad.json: report: 'tool' is missing"),
    (b"[" * 100_000, 3, "error[report]: bad.json: not JSON"),
])  # fmt: skip
def test_what_is_no_report_is_refused_in_one_line(
    tqtool: Run, tmp_path: Path, content: bytes, status: int, message: str
) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    done = tqtool("report", "bad.json", "--json")
    assert done.returncode == status
    assert message in done.stderr
    assert done.stderr.count("\n") <= 2
    assert json.loads(done.stdout)["exit"] == status


@pytest.mark.parametrize(("arguments", "status", "message"), [
    (["report", "nothing.json"], 3, "error[not-found]: nothing.json: no such file"),
    (["report", "r.json", "--json-out", "r.json", "-f"], 2, "error[same-file]: r.json"),
    (["report", "r.json", "--html-out", "-"], 2, "error[usage]: --html-out needs a file name"),
    (["report", "r.json", "--html-out", "a", "--tsv-out", "./a"], 2, "--html-out and --tsv-out name the same file"),
    (["report", "r.json", "--html-out", "no/a.html"], 4, "error[write]: no/a.html: no such directory"),
    (["report", "r.json", "--json", "--format", "tsv"], 2, "--json contradicts --format tsv"),
    (["compare", "-", "-"], 2, "only one of the reports can come from stdin"),
    (["compare", "r.json", "nothing.json"], 3, "error[not-found]: nothing.json"),
])  # fmt: skip
def test_refusals(tqtool: Run, saved: Path, arguments: list[str], status: int, message: str) -> None:
    done = tqtool(*arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert "--json" in arguments or done.stdout == ""


def test_compare_prints_a_table_or_json(tqtool: Run, saved: Path) -> None:
    text = tqtool("compare", saved, saved)
    assert text.returncode == 0
    assert "K4/V4" in text.stdout
    found = json.loads(tqtool("compare", saved, saved, "--json").stdout)
    assert found["schema"] == "tqtool.compare/1"
    assert len(found["pairs"]) == 8


def test_all_files_are_the_same_for_any_number_of_threads_and_when_rendered_again(tqtool: Run, tmp_path: Path) -> None:
    from importlib.resources import files

    sample = str(files("tqtool") / "data" / "sample")
    names = {"json": "r.json", "markdown": "r.md", "html": "r.html", "junit": "r.xml", "tsv": "r.tsv"}

    def outputs(folder: str) -> list[str]:
        (tmp_path / folder).mkdir()
        return [part for kind, name in names.items() for part in (f"--{kind}-out", f"{folder}/{name}")]

    measured = [
        tqtool("validate", sample, "-c", "K4/V2,K3/V3", "--max-queries", 64, "--gate", "lenient", "--threads", n,
               *outputs(f"threads{n}"))
        for n in (1, 2)
    ]  # fmt: skip
    again = tqtool("report", "threads1/r.json", *outputs("again"))
    assert [done.returncode for done in (*measured, again)] == [1, 1, 0]
    assert again.stdout == measured[0].stdout == measured[1].stdout
    for name in names.values():
        texts = [(tmp_path / folder / name).read_text() for folder in ("threads1", "threads2", "again")]
        if name == "r.json":  # `run` alone may differ between runs
            texts = [json.dumps(json.loads(text) | {"run": {}}) for text in texts]
        assert texts[0] == texts[1] == texts[2], name
