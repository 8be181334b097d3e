"""The page is one file that runs its own program alone, whatever the completions say."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from agent_tunix.lab.report import page
from agent_tunix.lab.report.page import HERE, render, report_on, write_report

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!-- {{data}} \ud800"


class Elements(HTMLParser):
    """The elements of a page, with the text of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


@pytest.fixture
def elements(write_run, tmp_path):
    folder = write_run(tmp_path / "<b>run</b>", completion=HOSTILE)
    return Elements(write_report(folder).read_text())


def test_hostile_completions_stay_text(elements):
    assert [tag for tag, _ in elements.found if tag in ("script", "img", "b", "iframe")] == ["script", "script"]
    data = json.loads(elements.scripts[0])
    assert data["sections"][0]["samples"][0]["columns"][0]["completions"][0]["text"] == HOSTILE
    assert "<" not in elements.scripts[0]


def test_the_policy_lets_the_page_s_own_program_run_and_nothing_else(elements):
    policy = next(attrs["content"] for tag, attrs in elements.found if attrs.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(elements.scripts[1].encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"


def test_nothing_is_named_that_a_browser_would_fetch(elements):
    links = [value for _, attrs in elements.found for name, value in attrs.items() if name in ("src", "href")]
    assert links == ["data:,"]
    style = (HERE / "page.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
    program = "".join((HERE / name).read_text() for name in page.PROGRAM)
    assert set(re.findall(r"https?://[^\"']+", program)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in program


def test_a_folder_whose_name_is_no_text_has_a_page_too(write_run, tmp_path):
    folder = write_run(tmp_path / "run").rename(tmp_path / "r\udcff")
    assert json.loads(Elements(write_report(folder).read_text()).scripts[0])["name"] == "r\udcff"


def test_without_its_program_the_verdict_can_still_be_read(write_run, tmp_path):
    text = render(write_run(tmp_path / "run"))
    assert re.search(r"<noscript><p>Healthy: held-out accuracy rose", text)


def test_a_page_is_written_in_one_stroke(write_run, tmp_path):
    folder = write_run(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    assert write_report(folder) == folder / "report.html"
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}


def test_a_fault_in_the_report_is_told_and_does_not_end_the_run(write_run, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    told: list[str] = []
    monkeypatch.setattr(page, "render", lambda folder: 1 / 0)
    report_on(folder, told.append)
    assert len(told) == 1
    assert "ZeroDivisionError" in told[0]
    assert f"agent-tunix report {folder}" in told[0]
    assert "\n" not in told[0]


def test_the_verb_prints_where_the_page_is(write_run, command, tmp_path):
    write_run(tmp_path / "run")
    outcome = command("report", "run")
    assert (outcome.code, outcome.out.strip()) == (0, "run/report.html")


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--jsno"], ["absent"], ["."]])
def test_mistakes_are_answered_without_a_traceback(command, arguments):
    outcome = command("report", *arguments)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert outcome.err


def test_help_is_given(command):
    assert "usage" in command("report", "--help").out
    assert "usage" in command("watch", "--help").out
