"""`evaluate`: which versions run, what counts as a score, and what a restart repeats."""

import json
from contextlib import closing

import pytest

from delta_weight_sync.errors import CommandError
from delta_weight_sync.evaluation import Evaluations, parsed_scores, scores_of
from delta_weight_sync.reader import RunReader, open_run
from tests.cli.command import command
from tests.support.buckets import CountedBucket
from tests.support.published_run import write_run


@pytest.fixture
def url(tmp_path):
    url = (tmp_path / "bucket").as_uri()
    write_run(url, tmp_path / "base", versions=5)
    return f"{url}#test"


def test_each_version_that_is_due_is_evaluated_once(url, tmp_path):
    words = ["evaluate", url, "--every", 2, "--once", "--"]
    script = [
        "sh",
        "-c",
        'test -e "$0/config.json" && echo $1 >> "$2" && echo \'{"a b": 0.5, "n": \'$1\'}\'',
        "{path}",
        "{version}",
        tmp_path / "ran of it",
    ]
    done = command(*words, *script)
    assert (done.code, done.complaint) == (0, "")
    assert done.output.splitlines()[-1] == "version 4: a b 0.5, n 4"
    assert command(*words, *script).output == "", "a restart evaluates nothing twice"
    assert (tmp_path / "ran of it").read_text().split() == ["0", "2", "4"]
    assert [(e.version, e.name, e.scores["n"]) for e in scores_of(open_run(url))] == [
        (0, "eval", 0.0),
        (2, "eval", 2.0),
        (4, "eval", 4.0),
    ]
    rows = [json.loads(line) for line in command("log", url, "--scores", "--json").output.splitlines()]
    assert rows[1] == {"version": 0, "score": "eval/n", "value": "0"}
    again = command("evaluate", url, "--every", 4, "--once", "--name", "other", "--", "echo {version}")
    assert again.output.splitlines() == ["version 0: score 0", "version 4: score 4"]
    assert command("log", url).code == 0, "trainers and readers of versions do not mind the other log"


def test_a_command_that_fails_is_reported_and_the_others_go_on(url):
    text = "test {version} -ne 2 && echo {version}"
    done = command("evaluate", url, "--every", 1, "--once", "--", text)
    assert done.output.splitlines()[-1] == "version 4: score 4"
    assert "version 2 has no scores: the command ended with exit code 1" in done.complaint
    assert done.code == 1
    assert command("evaluate", url, "--every", 1, "--once", "--", "echo {version}").output == (
        "version 2: score 2\n"
    ), "only the version without scores is due at the next start"


def test_a_damaged_or_lost_version_is_reported_and_later_ones_are_evaluated(url):
    bucket = open_run(url).bucket
    manifests = sorted(info.key for info in bucket.list("runs/test/manifests/"))
    bucket.put(manifests[1], b"damaged")
    deltas = sorted(info.key for info in bucket.list("runs/test/deltas/"))
    bucket.delete(deltas[-1:])
    done = command("evaluate", url, "--every", 1, "--once", "--", "echo {version}")
    assert done.output.splitlines() == [f"version {n}: score {n}" for n in (0, 2, 3)]
    said = done.complaint.splitlines()
    assert [line.split(":")[1] for line in said[:2]] == [f" version {n} has no scores" for n in (1, 4)]
    assert manifests[1] in said[0]
    assert deltas[-1] in said[1]
    assert (done.code, said[2:]) == (
        1,
        ["delta-weight-sync evaluate: 2 versions have no scores: see the lines above"],
    )


def test_a_look_without_news_is_one_listing(url):
    """The Hub allows a free user 1,000 requests in five minutes, and `evaluate` looks every five seconds."""
    command("evaluate", url, "--every", 1, "--once", "--", "echo {version}")
    bucket = CountedBucket(open_run(url).bucket)
    with closing(Evaluations(RunReader(bucket, "test"), "eval", 1)) as evaluations:
        bucket.asked.clear()
        assert [evaluations.manifest(version) for version in evaluations.due(())] == [None] * 5
        assert bucket.asked == {"list": 1, "get": 5}, "after a start, each manifest is read once"
        bucket.asked.clear()
        assert evaluations.due(()) == []
        assert bucket.asked == {"list": 1}


def test_a_command_that_is_the_same_for_all_versions_is_refused(url):
    assert "use {path}" in command("evaluate", url, "--once", "--", "echo", "1").complaint


@pytest.mark.parametrize("printed", ["", "done", '{"a": "b"}', '{"a": NaN}', "{}", "[1]", "Infinity"])
def test_what_is_no_score_is_an_error_that_shows_the_form(printed):
    with pytest.raises(CommandError, match="print a number such as"):
        parsed_scores(printed)


def test_the_last_line_has_the_scores():
    assert parsed_scores("loading\n0.25\n\n") == {"score": 0.25}
    assert parsed_scores('{"a": 1, "b": true}') == {"a": 1.0, "b": 1.0}


def test_bisect_finds_the_first_version_beyond_a_limit_in_the_scores(url):
    # Accuracies of the versions 0, 2 and 4: 1, 0.5 and 0.25; losses of 0 to 4: the version's number.
    accuracy = 'python -c "print(1 / ({version} or 1))"'
    command("evaluate", url, "--every", 2, "--once", "--name", "accuracy", "--", accuracy)
    command("evaluate", url, "--every", 1, "--once", "--", "echo '{\"loss\":' {version}'}'")
    found = command("bisect", url, "--score", "accuracy/score", "--below", 0.3)
    assert (found.code, found.complaint) == (0, "")
    assert found.output.splitlines() == [
        "version 4 is the first with accuracy/score below 0.3: 0.25",
        "version 2 had 0.5",
        f"to judge those between: delta-weight-sync bisect {url} --good 2 --bad 4 --eval COMMAND",
        f"to see what changed there: delta-weight-sync blame {url} --version 4",
    ]
    losses = ["bisect", url, "--score", "eval/loss", "--above"]
    assert command(*losses, 2).output.startswith(
        "version 3 is the first with eval/loss above 2: 3\nversion 2 had 2\n"
    )
    assert command(*losses, -1, "--good", 2).output.startswith("version 2 is the first"), "and not version 0"
    assert "none of 3 versions with a score eval/loss is above 2" in command(*losses, 2, "--bad", 2).complaint
    unknown = command("bisect", url, "--score", "loss", "--above", 2)
    assert unknown.complaint.endswith(
        "the log has no score 'loss': the scores are accuracy/score, eval/loss\n"
    )
    assert "needs a limit: add --below or --above" in command("bisect", url, "--score", "eval/loss").complaint
    assert "name it with --score" in command("bisect", url, "--eval", "{path}", "--below", 1).complaint
