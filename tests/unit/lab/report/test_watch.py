"""The live page: two paths, this machine alone, and always what the folder says now."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from unittest.mock import Mock

import pytest

from agent_tunix.errors import UserError
from agent_tunix.lab.report import watch


@pytest.fixture
def serve():
    """Serves a folder on a free port, and gives a way to ask it."""
    servers = []

    def start(folder):
        server = watch.Server([folder], 0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))

        def ask(path="/data.json", method="GET", host=None):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request(method, path, headers={"Host": host} if host else {})
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            return answer.status, text

        return ask

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_it_waits_for_a_folder_and_then_follows_it(serve, write_run, tmp_path):
    ask = serve(tmp_path / "run")
    assert json.loads(ask()[1])["verdict"]["lead"] == "Waiting"
    (tmp_path / "run").mkdir()
    assert json.loads(ask()[1])["verdict"]["lead"] == "Waiting"
    (tmp_path / "run").rmdir()
    write_run(tmp_path / "run", steps=3, status=None)
    kl = json.loads(ask()[1])["sections"][0]["charts"][-4]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "kl": 0.5, "lr": 1e-5}\n{"step": 5, "kl":')
    newer = json.loads(ask()[1])["sections"][0]["charts"][-4]
    assert kl["id"] == newer["id"] == "kl"
    assert newer["series"][0]["points"] == [*kl["series"][0]["points"], [4, 0.5]]


def test_a_configuration_that_is_being_written_is_waited_for(serve, tmp_path):
    (tmp_path / "config.yaml").write_text("a: [1,")
    status, text = serve(tmp_path)()
    assert status == 200
    assert "cannot be read yet" in json.loads(text)["verdict"]["text"]


@pytest.mark.parametrize("place", ["run", "sweep/0", "tune/1-coarse-rate/0"])
def test_whatever_a_report_is_made_of_is_seen_to_change(write_run, tmp_path, place):
    folder, top = write_run(tmp_path / place), tmp_path / place.partition("/")[0]
    for name in ("config.yaml", "metrics.jsonl", "evals.jsonl", "samples.jsonl", "summary.json", "lr_find.json"):
        before = watch._footprint(top)
        with open(folder / name, "a") as file:
            file.write("\n")
        assert watch._footprint(top) != before, name


def test_a_job_that_joins_a_sweep_is_seen(serve, write_run, tmp_path):
    write_run(tmp_path / "0")
    ask = serve(tmp_path)
    assert len(json.loads(ask()[1])["sections"][0]["table"]["rows"]) == 1
    write_run(tmp_path / "1")
    assert len(json.loads(ask()[1])["sections"][0]["table"]["rows"]) == 2


def test_the_page_is_live_and_may_ask_its_own_server(serve, write_run, tmp_path):
    status, text = serve(write_run(tmp_path / "run"))("/")
    assert status == 200
    assert '"live":true' in text
    assert "connect-src 'self'" in text


def test_only_two_paths_one_method_and_this_machine_are_answered(serve, write_run, tmp_path):
    ask = serve(write_run(tmp_path / "run"))
    assert ask("/config.yaml")[0] == 404
    assert ask("/../run/config.yaml")[0] == 404
    assert ask("/", method="POST")[0] == 501
    assert ask("/", host="evil.example")[0] == 403
    assert ask("/data.json", host="evil.example:80")[0] == 403
    assert ask("/", host="localhost:8265")[0] == 200
    assert ask("/", host="127.0.0.1")[0] == 200
    assert ask("/?again", host="LOCALHOST")[0] == 200
    assert ask("http://127.0.0.1/")[0] == 200
    assert ask("http://[::1/", host="127.0.0.1") == (400, "Invalid IPv6 URL.\n")
    assert ask("/", method="HEAD") == (200, "")


def test_several_runs_have_a_page_of_all_and_one_each(serve, write_run, tmp_path):
    """A folder of runs, to which others come meanwhile."""
    write_run(tmp_path / "runs" / "first", accuracies=(0.4, 0.8))
    ask = serve(tmp_path / "runs")
    (section,) = json.loads(ask()[1])["sections"]
    assert [row["cells"][1][0] for row in section["table"]["rows"]] == ["first"]
    write_run(tmp_path / "runs" / "second", status=None)
    write_run(tmp_path / "runs" / "sweep" / "0")
    page = json.loads(ask()[1])
    (section,) = page["sections"]
    assert [row["cells"][1][0] for row in section["table"]["rows"]] == ["first", "second", "sweep"]
    assert section["table"]["rows"][0]["cells"][2:4] == [["80.0 %", 0.8], ["73.9 to 85.0 %", pytest.approx(0.739, abs=1e-3)]]
    assert [row["cells"][-1][0] for row in section["table"]["rows"]][:2] == ["completed", "crashed"]
    kl = next(chart for chart in section["charts"] if chart["id"] == "kl")
    assert len(kl["series"]) == 2
    assert json.loads(ask("/2/data.json")[1])["name"] == "second"
    assert '"live":true' in ask("/3/")[1]
    assert ask("/4/data.json")[0] == ask("/0/")[0] == 404
    with open(tmp_path / "runs" / "second" / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "kl": 0.5, "lr": 1e-5}\n')
    (section,) = json.loads(ask()[1])["sections"]
    assert section["table"]["rows"][1]["cells"][4] == ["99", 99]


def test_a_port_that_is_taken_is_said_or_passed_over(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} is in use"):
            watch.open_server([tmp_path], port)
        monkeypatch.setattr(watch, "PORT", port)
        with watch.open_server([tmp_path], None) as server:
            assert port < server.server_port < port + watch.TRIES
            assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "arguments", [[], ["--all"], ["a", "--port"], ["a", "--port", "x"], ["a", "--port", "70000"], ["-x"]]
)
def test_mistakes_are_answered_without_a_traceback(command, arguments):
    outcome = command("watch", *arguments)
    assert outcome.code == 2
    assert "usage" in outcome.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_it_quietly(command, write_run, tmp_path, monkeypatch, number):
    write_run(tmp_path / "run")
    signal.signal(number, signal.SIG_DFL)  # a job in the background may have been started to ignore it
    monkeypatch.setattr(watch, "time", Mock(sleep=lambda seconds: signal.raise_signal(number)))
    outcome = command("watch", "run")
    assert outcome.code == 0
    assert "http://127.0.0.1:" in outcome.out
    assert outcome.err == ""
    assert "no such folder yet" not in outcome.out
    assert "no such folder yet" in command("watch", "other").out


@pytest.mark.parametrize("reading", ["contents", "kind_of"])
@pytest.mark.parametrize("fault", [FileNotFoundError(2, "No such file or directory", "0"), TypeError("not a number")])
def test_a_folder_that_goes_while_it_is_read_is_waited_for(serve, tmp_path, monkeypatch, reading, fault):
    """As is one with something in it that nobody has thought of."""
    monkeypatch.setattr(watch, reading, Mock(side_effect=fault))
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    status, text = serve(tmp_path)()
    assert status == 200
    assert "cannot be read yet" in json.loads(text)["verdict"]["text"]
