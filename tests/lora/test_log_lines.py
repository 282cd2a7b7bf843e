import io
import json
import logging
import subprocess
import sys

import pytest

from lora import log_lines
from lora.log_lines import LineFormatter, choose_format

THREAD = """
from threading import Thread
from lora import log_lines
log_lines.begin("fetcher")
Thread(target=lambda: {}["zebra"]).start()
"""


@pytest.mark.parametrize(
    ("command", "who"),
    [
        (["-m", "engine.retired", "zebra/engine-2.json"], ("retired", "engine-2")),
        (["-c", THREAD], ("fetcher", None)),
    ],
)
def test_an_error_that_nobody_catches_is_one_line_that_says_where_and_not_what(command, who):
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    (line,) = ended.stderr.splitlines()
    said = json.loads(line)
    assert (said["level"], said["process"], said.get("engine")) == ("critical", *who)
    assert said["trace"][0] in ("FileNotFoundError", "KeyError")
    assert len(said["trace"]) > 1
    assert "zebra" not in line


def test_a_message_says_whose_it_is():
    record = logging.LogRecord("engine.core", logging.WARNING, "", 0, "%d steps", (3,), None)
    record.created = 61.0
    lines = [LineFormatter(f, process="engine", engine="e-2") for f in ("json", "text")]
    assert json.loads(lines[0].format(record)) == {
        "at": "1970-01-01T00:01:01.000+00:00", "level": "warning", "process": "engine",
        "engine": "e-2", "logger": "engine.core", "message": "3 steps",
    }  # fmt: skip
    assert lines[1].format(record) == "engine e-2: 00:01:01 warning engine.core 3 steps"


def test_the_format_is_the_parents_choice_and_text_on_a_terminal_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv(log_lines.VARIABLE, raising=False)
    assert [choose_format(Terminal()), choose_format(io.StringIO())] == ["text", "json"]
    monkeypatch.setenv(log_lines.VARIABLE, "text")
    assert [choose_format(io.StringIO()), choose_format(io.StringIO(), "json")] == ["text", "json"]
