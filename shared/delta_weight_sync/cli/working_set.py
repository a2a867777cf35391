"""Commands for versions: name them, compare them, wait for them, judge them and share them."""

import argparse
import inspect
import json
import math
import os
import re
import shlex
import sys
import time
from contextlib import closing
from tempfile import TemporaryFile
from typing import Any, Final

from delta_weight_sync import badge
from delta_weight_sync.cli.parts import URLS, add_run, opened, print_rows, version_or_tag
from delta_weight_sync.cli.shell import PLACES, ended_by_signals, run_in_shell
from delta_weight_sync.differences import differences
from delta_weight_sync.errors import (
    BucketError,
    CodecError,
    CommandError,
    ConfigError,
    NoVersionError,
    ObjectMissingError,
    ProtocolError,
    printable,
)
from delta_weight_sync.evaluation import Evaluations, parsed_scores
from delta_weight_sync.push import push_version
from delta_weight_sync.reader import Problems, RunReader, open_run
from delta_weight_sync.records import Manifest
from delta_weight_sync.run import Run
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.tags import remove_tag, set_tag, tags_of

_LOOK_S: Final = 5.0  # seconds between two looks for versions to evaluate
_READ: Final = 1 << 16  # bytes of a command's output that are read, from its end
_LISTED: Final = 20  # max tensors that `diff` lists, except with --json


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments and the function of the command `name`. The function's docstring ends the help."""
    run = _COMMANDS[name]
    parser.epilog = inspect.getdoc(run)
    parser.set_defaults(run=run)
    add = parser.add_argument
    if name == "diff":
        text = f"a run and a version of it, a number or a tag (default: the newest). The run: {URLS}"
        add("before", metavar="RUN@VERSION", help=text)
        add("after", metavar="RUN@VERSION", help="another version, of this run or of another one")
        add("--json", action="store_true", help="print JSON")
        return
    add_run(parser)
    if name == "tag":
        add("version", nargs="?", type=version_or_tag, metavar="VERSION", help="number or tag of the version")
        add("name", nargs="?", metavar="NAME", help="the tag: letters, digits, '.', '_', '-', first a letter")
        add("--remove", metavar="NAME", help="remove a tag")
        add("--json", action="store_true", help="print JSON")
    elif name == "push":
        text = "number or tag of the version (default: the newest)"
        add("--version", type=version_or_tag, metavar="VERSION", help=text)
        add("--to", required=True, metavar="OWNER/NAME", help="the model repository, created if missing")
        add("--public", action="store_true", help="make a new repository public (default: private)")
    elif name == "badge":
        text = "number or tag of the version (default: the newest)"
        add("--version", type=version_or_tag, metavar="VERSION", help=text)
    elif name == "evaluate":
        text = "evaluate each version whose number N divides (default: 50)"
        add("--every", type=_positive, default=50, metavar="N", help=text)
        add("--name", default="eval", help="what the scores are called in the log (default: eval)")
        add("--once", action="store_true", help="exit when all versions of now are evaluated")
        add("command_words", nargs="+", metavar="COMMAND", help="after --: the command that prints scores")
    else:
        text = "number or tag of the version (default: the newest)"
        add("--version", type=version_or_tag, metavar="VERSION", help=text)
        add("--replicas", nargs="+", required=True, metavar="URL", help="the replicas")
        add("--timeout", type=_seconds, metavar="S", help="seconds to wait at most (default: for ever)")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _tag(arguments: argparse.Namespace) -> None:
    """Without VERSION and NAME, list the tags. A tag is accepted wherever a version is, and `gc` and trainers
    with --keep keep its version. If another version has this tag, it loses the tag. In a signed run, tags are
    signed, too: set DELTA_WEIGHT_SYNC_SIGNING_KEY.

      delta-weight-sync tag RUN 41 best
      delta-weight-sync checkout RUN --version best --out best
    """
    reader = opened(arguments)
    if arguments.remove is not None:
        if arguments.version is not None:
            raise ConfigError("--remove takes only the name of a tag: leave VERSION and NAME out")
        remove_tag(reader, arguments.remove)
        print(f"tag {arguments.remove} is removed")
        return
    if arguments.version is None:
        _list_tags(reader, arguments.json)
        return
    if arguments.name is None:
        raise ConfigError(f"name the tag after the version: tag RUN {arguments.version} NAME")
    tag = set_tag(reader, arguments.version, arguments.name)
    signed = "" if tag.signature else ", not signed"
    print(f"version {tag.version} (digest {tag.digest}) has the tag {tag.name}{signed}")


def _list_tags(reader: RunReader, as_json: bool) -> None:
    problems: Problems = {}
    tags = tags_of(reader, reader.manifest(), problems)
    rows = ({"version": tag.version, "digest": tag.digest, "tag": tag.name} for tag in tags)
    print_rows("{version:>7}  {digest:16}  {tag}", rows, as_json)
    for error in problems.values():
        if not as_json:
            print(f"not used: {error}")


def _diff(arguments: argparse.Namespace) -> None:
    """For each tensor: how many weights differ, their share, and the largest change of a value.

    delta-weight-sync diff RUN@5 RUN@9
    delta-weight-sync diff RUN@best OTHER@best
    """
    rows: list[dict[str, Any]] = []
    changed = total = tensors = 0
    largest: float | None = None
    for tensor in differences(_version_of(arguments.before), _version_of(arguments.after)):
        numel = math.prod(tensor.shape)
        total += numel
        tensors += 1
        if not (count := tensor.positions.size):
            continue
        changed += count
        moved = tensor.largest_change
        moved = None if moved is None or not math.isfinite(moved) else moved
        largest = max(largest or 0.0, moved) if moved is not None else largest
        row = {"changed": int(count), "share": count / numel, "largest": moved}
        rows.append(row | {"tensor": f"{tensor.name} {list(tensor.shape)}"})
    rows.sort(key=lambda row: (row["share"], row["changed"]), reverse=True)
    facts = {"changed": int(changed), "total": total, "tensors": tensors, "largest": largest}
    if arguments.json:
        print(json.dumps(facts | {"rows": rows}))
        return
    share = 100 * changed / total if total else 0.0
    print(f"{changed:,} weights of {total:,} differ, {share:.3f} %, in {len(rows)} of {tensors} tensors")
    if rows:
        print(f"largest change of a weight: {_number(largest)}")
        shown = [row | {"largest": _number(row["largest"])} for row in rows[:_LISTED]]
        print_rows("{changed:>10}  {share:>9}  {largest:>9}  {tensor}", shown, as_json=False)
    if len(rows) > _LISTED:
        print(f"{len(rows) - _LISTED} more tensors differ, by equal or smaller shares")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _version_of(text: str) -> tuple[RunReader, Manifest]:
    """The run and the version that RUN@VERSION names."""
    match = re.fullmatch(r"(.+)@([^@/#]+)", text)
    url, version = match.groups() if match else (text, "")
    reader = open_run(url)
    return reader, reader.manifest(version_or_tag(version) if version else None)


def _wait(arguments: argparse.Namespace) -> None:
    """Return when each replica serves the version or a newer one, with the published digest. The URL is
    that of a Space of this project, or of a vLLM server with the plugin. A private Space gets the token in
    SPACE_HF_TOKEN if SPACES lists it. The version need not be published yet.

      delta-weight-sync wait RUN --version 41 --replicas http://localhost:8000 --timeout 60
    """
    run = Run(arguments.url, arguments.run_name)
    served = run.wait(arguments.version, arguments.replicas, timeout_s=arguments.timeout)
    for url, version in served.items():
        print(f"{printable(url)} serves version {version}")


def _push(arguments: argparse.Namespace) -> None:
    """The repository gets config, tokenizer, weights, and a model card with run, version and digest. Weights
    of an earlier push are replaced.

      delta-weight-sync push RUN --version best --to me/model
    """
    reader = opened(arguments)
    manifest = reader.manifest(arguments.version)
    url = push_version(reader, manifest, arguments.to, public=arguments.public)
    print(f"version {manifest.version} (digest {manifest.digest}) is in {arguments.to}: {printable(url)}")


def _badge(arguments: argparse.Namespace) -> None:
    """The version is rebuilt from the bucket, so that the badge says "verified" only if the weights have the
    published digest. If they do not, the command fails and prints no badge. A badge says "signed" if this
    machine trusts a key that signed the version.

      delta-weight-sync badge RUN > badge.svg
    """
    reader = opened(arguments)
    manifest = reader.manifest(arguments.version)
    with Scratch() as folder:
        reader.checkout(manifest, folder)  # raises an error if the digest differs
    signed = bool(reader.public_keys and manifest.signature)
    print(badge.of_version(reader.keys.run, manifest.version, "good", signed=signed), end="")


def _evaluate(arguments: argparse.Namespace) -> None:
    """COMMAND runs in a shell for each version that is due, oldest first, and for later ones as they come.
    {path} becomes a folder with the version as an ordinary checkpoint, {version} its number, and {digest} its
    digest. The last line that COMMAND prints has the scores: a number, or a JSON object of numbers.

      delta-weight-sync evaluate RUN --every 50 -- python evaluate.py {path}

    The scores go into the run's log; `log --scores` prints them, and the dashboard draws them. A version that
    has scores under this name is not evaluated again, also after a restart. If COMMAND fails, or an object of
    the version is damaged or missing, the version is left out until the next start, and with --once the exit
    code is 1. The log is not signed.
    """
    words: list[str] = arguments.command_words
    text = words[0] if len(words) == 1 else " ".join(map(_quoted, words))
    if not PLACES.search(text):
        raise CommandError("COMMAND is the same for all versions: use {path}, {version} or {digest} in it")
    reader = opened(arguments)
    failed: set[int] = set()
    with ended_by_signals(), closing(Evaluations(reader, arguments.name, arguments.every)) as evaluations:
        while True:
            try:
                for version in evaluations.due(failed):
                    try:
                        if manifest := evaluations.manifest(version):
                            _evaluate_one(reader, manifest, text, evaluations)
                    except NoVersionError:  # its trainer has not stored HEAD yet
                        continue
                    except (CommandError, ProtocolError, CodecError, ObjectMissingError) as error:
                        failed.add(version)
                        _complain(f"version {version} has no scores: {error}")
            except BucketError as error:
                if arguments.once:
                    raise
                _complain(str(error))
            if arguments.once:
                if failed:
                    raise CommandError(f"{len(failed)} versions have no scores: see the lines above")
                return
            time.sleep(_LOOK_S)


def _evaluate_one(reader: RunReader, manifest: Manifest, command: str, evaluations: Evaluations) -> None:
    with Scratch() as folder, TemporaryFile() as output:
        reader.checkout(manifest, folder)
        started = time.monotonic()
        code = run_in_shell(command, folder, manifest, output)
        seconds = time.monotonic() - started
        output.seek(max(0, output.seek(0, os.SEEK_END) - _READ))
        printed = output.read().decode(errors="replace")
    if code:
        raise CommandError(f"the command ended with exit code {code}")
    scores = parsed_scores(printed)
    evaluations.add(manifest, scores, seconds)
    words = ", ".join(f"{name} {value:.6g}" for name, value in scores.items())
    print(f"version {manifest.version}: {printable(words)}", flush=True)


def _quoted(word: str) -> str:
    """A word for the shell, in which {path} and the other names stay what they are."""
    parts = re.split(rf"({PLACES.pattern.replace('(', '(?:')})", word)
    return "".join(part if PLACES.fullmatch(part) else shlex.quote(part) for part in parts if part)


def _complain(sentence: str) -> None:
    print(f"delta-weight-sync evaluate: {printable(sentence)}", file=sys.stderr, flush=True)


_COMMANDS: Final = {run.__name__[1:]: run for run in (_tag, _diff, _wait, _evaluate, _push, _badge)}
