"""A log that no client can flood, as lines of JSON."""

import json
import logging

import pytest

from space_guard.logs import JsonLines, LogLimit


def record(line: int, *, message: str = "%s", fields: dict | None = None) -> logging.LogRecord:
    made = logging.LogRecord("uvicorn.error", logging.WARNING, "uvicorn.py", line, message, ("x",), None)
    made.fields = fields or {}
    return made


@pytest.mark.finding(19)
def test_a_minute_has_a_limit_and_the_next_one_says_how_many_lines_were_dropped():
    now = [0.0]
    limit = LogLimit(20, clock=lambda: now[0])
    passed = [limit.filter(record(line)) for line in range(1000)]
    assert passed == [True] * 20 + [False] * 980
    now[0] = 60.0
    first, second = record(1), record(2)
    assert limit.filter(first)
    assert limit.filter(second)
    assert first.getMessage() == "(980 similar lines were dropped) x"
    assert second.getMessage() == "x"


@pytest.mark.finding(10)
def test_a_flood_of_one_kind_does_not_silence_another():
    now = [0.0]
    limit = LogLimit(3, per_source=True, clock=lambda: now[0])
    assert [limit.filter(record(1)) for _ in range(5)] == [True] * 3 + [False] * 2
    assert limit.filter(record(2))
    now[0] = 60.0
    other, same = record(2), record(1)
    assert limit.filter(other)
    assert limit.filter(same)
    assert (other.getMessage(), same.getMessage()) == ("x", "(2 similar lines were dropped) x")


def test_a_line_is_one_json_object_with_its_fields():
    line = JsonLines().format(record(1, message="two\nlines of %s", fields={"turns": 3}))
    assert "\n" not in line
    wanted = {"level": "warning", "logger": "uvicorn.error", "message": "two\nlines of x", "turns": 3}
    assert wanted.items() <= json.loads(line).items()
