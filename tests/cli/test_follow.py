"""`delta-weight-sync follow`, and `follow` in Python: a folder at the newest version, never a torn one."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
from safetensors import safe_open

from delta_weight_sync import BucketError, FolderError, KeyFormatError, Run
from delta_weight_sync import follow as follow_versions
from delta_weight_sync.checkout import RECORD, CheckpointFolder
from delta_weight_sync.checkpoint import WEIGHTS, read_bits, to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import open_run
from delta_weight_sync.store.notifications import Notifications
from tests.cli.command import Result, command
from tests.support.real_run import TENSORS, Drifting
from tests.support.waiting import soon

Turns = Callable[..., list[float]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a model"


@pytest.fixture
def writes(tmp_path: Path) -> Iterator[Callable[..., Drifting]]:
    """Begins a run in `tmp_path / "bucket"`, in place of the one that is there."""
    with contextlib.ExitStack() as stack:

        def begin(**changes: object) -> Drifting:
            run = Drifting(tmp_path / "bucket", **changes)
            stack.callback(run.close)
            return run

        yield begin


@pytest.fixture
def run(writes: Callable[..., Drifting]) -> Drifting:
    return writes()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """`turns(first, second, ...)`: what happens in each pause of `follow`; in the next one Ctrl-C is pressed.

    Returns the lengths of the pauses, in seconds; nobody waits for them.
    """

    def set_up(*happens: Callable[[], object]) -> list[float]:
        pauses: list[float] = []

        def wait(notice: Notifications, seconds: float) -> None:
            if len(pauses) == len(happens):
                raise KeyboardInterrupt
            pauses.append(seconds)
            happens[len(pauses) - 1]()
            notice.look_now()

        monkeypatch.setattr(Notifications, "wait", wait)
        monkeypatch.setattr("delta_weight_sync.watch.monotonic", lambda: sum(pauses))
        return pauses

    return set_up


def follow(run: Drifting, folder: Path, *words: object) -> Result:
    return command("follow", run.url, "--into", folder, *words)


def digest(folder: Path) -> str:
    return to_hex(state_digest(dict(read_bits(folder))))


def versions(folder: Path) -> list[str]:
    """The folders of versions; there is nothing else but `current` and what its names hide."""
    shown = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert shown.pop() == "current"
    return shown


def holds(folder: Path, run: Drifting) -> None:
    """`folder/current` is the newest version, as `checkout` writes it."""
    out = folder.with_name("checkout")
    shutil.rmtree(out, ignore_errors=True)
    assert command("checkout", run.url, "--out", out).code == 0
    np.testing.assert_equal(dict(read_bits(folder / "current")), dict(read_bits(out)))
    names = {path.name for path in (folder / "current").iterdir()}
    assert names == {path.name for path in out.iterdir() if path.name[0] != "."} | {RECORD}


def test_follows_version_by_version_and_tells_the_engine(run, folder, turns, tmp_path):
    def step() -> None:
        holds(folder, run)
        run.step()

    turns(step, step, step)
    told = tmp_path / "told"
    result = follow(run, folder, "--on-version", f"echo {{version}} {{digest}} {{path}} >> {told}")
    assert (result.code, result.complaint) == (130, "")
    holds(folder, run)
    digests = [manifest.digest for manifest in run.reader.versions()][::-1]
    expected = [f"{v} {digest} {folder}/{v:08d}" for v, digest in enumerate(digests)]
    assert told.read_text().splitlines() == expected
    assert versions(folder) == ["00000002", "00000003"], "the one before may still be read"


def test_a_new_version_costs_its_deltas_and_no_checkout(run, folder, turns):
    def several() -> None:
        next(run.folder.glob("runs/*/anchors/*/model.safetensors")).unlink()
        for _ in range(3):
            run.step()

    turns(several, run.step)
    result = follow(run, folder)
    assert result.complaint == ""
    assert digest(folder / "current") == run.newest.digest
    assert versions(folder) == ["00000003", "00000004"]


def test_a_reader_keeps_what_it_has_opened(run, folder, turns):
    with contextlib.ExitStack() as stack:
        seen = {}

        def open_it() -> None:
            path = (folder / "current").resolve() / "model.safetensors"
            seen["file"] = stack.enter_context(safe_open(path, framework="pt"))
            seen["before"] = run.newest.digest
            run.step()

        turns(open_it, run.step, run.step)
        follow(run, folder)
        state = {name: to_bits(seen["file"].get_tensor(name)) for name in seen["file"].keys()}  # noqa: SIM118
        assert to_hex(state_digest(state)) == seen["before"] != run.newest.digest


@pytest.mark.full
def test_killed_at_any_moment_it_leaves_a_whole_version_and_goes_on(run, folder, tmp_path):
    follow(run, folder, "--once")
    old = run.newest
    new = run.step()
    words = [sys.executable, "-m", "tests.cli.killed_follower", run.url, folder, tmp_path]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    copies = [path for path in tmp_path.iterdir() if path.name.isdigit()]
    for killed in copies:
        assert digest(killed / "current") in (old.digest, new.digest), f"torn before change {killed.name}"
        result = follow(run, killed, "--once")
        assert (result.code, result.complaint) == (0, ""), f"after change {killed.name}"
        assert digest(killed / "current") == new.digest
        assert len(versions(killed)) <= 2
        assert not (killed / ".building").exists()
    assert len(copies) > 15, "each change of the disk is a moment"


def test_a_damaged_delta_is_named_and_the_old_version_stays(run, folder, turns):
    def damage() -> None:
        path = run.folder / run.step().deltas[-1].key
        damage.whole = path, path.read_bytes()
        path.write_bytes(bytes([*damage.whole[1][:-1], damage.whole[1][-1] ^ 1]))

    def mend() -> None:
        assert digest(folder / "current") == before
        assert versions(folder) == ["00000000"]
        path, data = damage.whole
        path.write_bytes(data)

    before = run.newest.digest
    turns(damage, lambda: None, mend, lambda: None, lambda: None)
    result = follow(run, folder)
    assert result.complaint.count(".safetensors is not the published object") == 1
    assert len(result.complaint.splitlines()) == 1
    holds(folder, run)


def test_a_newer_anchor_makes_up_for_a_damaged_delta(run, folder, turns):
    def damage() -> None:
        (run.folder / run.step().deltas[-1].key).unlink()

    def anchor() -> None:
        assert digest(folder / "current") == before
        with mock.patch.object(RunWriter, "anchor_is_due", return_value=True):
            run.steps(2)

    before = run.newest.digest
    turns(damage, anchor, lambda: None)
    assert "00000001.t1" in follow(run, folder).complaint
    holds(folder, run)


def test_an_empty_folder_begins_at_the_newest_version_that_is_whole(run, folder, turns, tmp_path):
    whole = run.step()
    (run.folder / run.step().deltas[-1].key).unlink()
    told = tmp_path / "told"

    def whole_version_is_there() -> None:
        assert digest(folder / "current") == whole.digest
        assert told.read_text() == "1\n"

    turns(whole_version_is_there)
    result = follow(run, folder, "--on-version", f"echo {{version}} >> {told}")
    assert "00000002.t1" in result.complaint
    assert versions(folder) == ["00000001"]


def test_a_store_that_fails_is_named_once_and_all_files_stay(run, folder, turns, tmp_path):
    def gone() -> None:
        run.folder.rename(tmp_path / "elsewhere")

    def back() -> None:
        assert digest(folder / "current") == run.newest.digest
        (tmp_path / "elsewhere").rename(run.folder)
        run.step()

    nothing = lambda: None  # noqa: E731
    turns(gone, *[nothing] * 40, back, *[nothing] * 30)
    result = command("follow", run.url, "--run", "drifting", "--into", folder)
    assert result.complaint == (
        f"delta-weight-sync follow: {run.url} does not exist: create the folder, or mount it\n"
    )
    holds(folder, run)


def test_following_begins_before_the_run_does(writes, folder, turns, tmp_path):
    begun = []
    turns(lambda: begun.append(writes()), lambda: None)
    (tmp_path / "bucket").mkdir()
    result = command("follow", (tmp_path / "bucket").as_uri(), "--run", "drifting", "--into", folder)
    assert "has not published a first version" in result.complaint
    holds(folder, begun[0])


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("changed", [{"seed": 7}, {"tensors": {"other.weight": (50, 50)} | TENSORS}])
def test_a_run_that_was_started_over_is_checked_out(writes, folder, turns, changed, first):
    """Other weights, or other tensors, under numbers that follow on what is held, or that are the same."""
    old = writes()
    new = []
    old.step()

    def start_over() -> None:
        shutil.rmtree(old.folder)
        new.append(writes(**changed))
        for _ in range(first):
            new[0].step()

    turns(start_over, lambda: new[0].step())
    result = follow(old, folder)
    assert result.complaint == ""
    holds(folder, new[0])


def test_a_run_that_was_started_over_with_the_same_weights_brings_its_own_chat_template(writes, folder):
    for text in ("old", "new"):
        run = writes(files={"chat_template.jinja": text})
        assert follow(run, folder, "--once").complaint == ""
        assert (folder / "current" / "chat_template.jinja").read_text() == text
        holds(folder, run)
        shutil.rmtree(run.folder)


def test_weights_that_somebody_wrote_into_are_replaced(run, folder, turns):
    def write_into() -> None:
        path = folder / "current" / "model.safetensors"
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"tampered")

    def write_and_step() -> None:
        write_into()
        run.step()

    turns(write_and_step)
    assert follow(run, folder).complaint == ""
    holds(folder, run)
    write_into()
    assert follow(run, folder, "--once").complaint == ""
    holds(folder, run)


@pytest.mark.parametrize("harm", [lambda at: os.truncate(at / WEIGHTS, 9999), Path.unlink])
def test_weights_that_are_cut_off_or_gone_are_replaced(run, folder, turns, harm):
    turns(lambda: [harm(folder / "current"), run.step()])
    assert follow(run, folder).complaint == ""
    holds(folder, run)


def test_once_brings_it_to_the_newest_version_and_tells_each_version_once(run, folder, tmp_path):
    told = tmp_path / "told"
    words = ("--once", "--on-version", f"echo {{version}} >> {told}")
    assert follow(run, folder, *words).output.endswith(f"is in {folder}/00000000\n")
    built = (folder / "current").stat().st_ino
    assert follow(run, folder, *words) == Result(0, "", "")
    assert (folder / "current").stat().st_ino == built, "it is not built again"
    run.steps(2)
    assert follow(run, folder, *words).code == 0
    assert told.read_text() == "0\n2\n"


def test_a_command_that_fails_is_offered_the_next_version_and_at_the_next_start(
    run, folder, turns, tmp_path, capfd
):
    told = tmp_path / "told"
    fails = f"echo tried {{version}}; test {{version}} != 1 && echo {{version}} >> {told}"
    turns(run.step, run.step)
    result = follow(run, folder, "--on-version", fails)
    assert result.complaint == (
        "delta-weight-sync follow: the command for version 1 ended with exit code 1\n"
    )
    assert told.read_text() == "0\n2\n"
    assert capfd.readouterr().out == "tried 0\ntried 1\ntried 2\n", "its output passes through"
    run.step()
    result = follow(run, folder, "--once", "--on-version", "exit 3")
    assert (result.code, result.complaint) == (
        1,
        "delta-weight-sync follow: the command for version 3 ended with exit code 3\n",
    )
    assert follow(run, folder, "--once", "--on-version", f"echo again {{version}} >> {told}").code == 0
    assert told.read_text() == "0\n2\nagain 3\n"


def test_placeholders_come_quoted_and_other_braces_stay(run, tmp_path):
    """As in the example for SGLang of --help, for a folder whose name ends the quotes."""
    folder = tmp_path / "it's a {version} model"
    body = tmp_path / "body"
    words = f"printf %s '{{\"model_path\": \"'{{path}}'\"}}' > {body}"
    assert follow(run, folder, "--once", "--on-version", words).code == 0
    assert json.loads(body.read_text()) == {"model_path": f"{folder}/00000000"}


@pytest.mark.finding("N15")
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_its_command_with_a_whole_checkpoint(run, folder, sign, code, tmp_path):
    ends = f"sleep 600 & echo $! > {tmp_path}/pid; kill -{sign.value} $PPID; sleep 600; exit 0"
    assert follow(run, folder, "--on-version", ends) == Result(
        code, f"version 0 (digest {run.newest.digest}) is in {folder}/00000000\n", ""
    )
    holds(folder, run)
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, if nothing has reaped it yet
        started = psutil.Process(int((tmp_path / "pid").read_text()))
        soon(lambda: started.status() == psutil.STATUS_ZOMBIE, "the command still runs")


def test_a_signal_while_a_version_is_built_leaves_nothing_of_it(run, folder, turns):
    turns(run.step)
    ends = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with mock.patch("delta_weight_sync.checkout.apply_delta", ends):
        assert follow(run, folder).code == 0
    assert versions(folder) == ["00000000"]
    assert not (folder / ".building").exists()


def test_what_is_not_ours_stays(run, folder):
    assert follow(run, folder, "--once").code == 0
    (folder / "00000007").mkdir()
    (folder / "00000007" / "precious").write_text("mine")
    (folder / "00000001").mkdir()
    for _ in range(2):
        run.step()
        assert follow(run, folder, "--once").code == 0
    assert (folder / "00000007" / "precious").read_text() == "mine"
    assert versions(folder) == ["00000001", "00000001.1", "00000002", "00000007"]
    shutil.rmtree(folder)
    (folder / "current").mkdir(parents=True)
    assert "holds other files: name an empty folder" in follow(run, folder, "--once").complaint


def is_free(run: Drifting, folder: Path) -> bool:
    return [each.version for each in follow_versions(run.url, folder, once=True)] == [run.newest.version]


def test_each_version_is_yielded_after_the_folder_holds_it_and_break_releases_the_folder(run, folder):
    for version in follow_versions(run.url, folder, poll_s=0.01):
        assert (version.version, version.digest) == (run.newest.version, run.newest.digest)
        assert version.path == (folder / "current").resolve()
        assert digest(version.path) == version.manifest.digest == run.newest.digest
        if version.version == 2:
            break
        run.step()
    assert is_free(run, folder)


def test_the_same_iterator_works_in_async_for(run, folder):
    async def consume() -> list[int]:
        seen = []
        async for version in follow_versions(Run(run.url), folder, poll_s=0.01):
            seen.append(version.version)
            if len(seen) == 3:
                break
            run.step()
        return seen

    assert asyncio.run(consume()) == [0, 1, 2]
    assert is_free(run, folder)


def test_a_cancelled_task_releases_the_folder(run, folder):
    async def wait() -> None:
        async for _ in follow_versions(run.url, folder, poll_s=0.01):
            pass

    async def consume() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.5)

    asyncio.run(consume())  # waits for the thread
    assert is_free(run, folder)


def test_one_version_can_be_pinned_and_close_ends_a_held_iterator(run, folder):
    run.steps(2)
    (pinned,) = follow_versions(run.url, folder, version=1)
    assert digest(folder / "current") == pinned.digest == open_run(run.url).manifest(1).digest
    with follow_versions(run.url, folder, poll_s=0.01) as versions:
        assert next(versions).version == 2
        with pytest.raises(FolderError, match="another process"):
            next(follow_versions(run.url, folder))
        versions.close()
        assert list(versions) == []
    assert is_free(run, folder)


def test_it_can_be_closed_where_an_error_is_reported(folder, tmp_path):
    versions = follow_versions(f"{tmp_path.as_uri()}#run", folder, on_error=lambda _: versions.close())
    thread = threading.Thread(target=list, args=[versions], daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_an_error_in_the_function_that_is_told_of_errors_does_not_end_following(run, folder, caplog):
    told = []

    def alert(error: Exception) -> None:
        told.append(error)
        delta.write_bytes(whole)
        raise ConnectionError("the chat is down")

    with follow_versions(run.url, folder, poll_s=0.01, on_error=alert) as versions:
        assert next(versions).version == 0
        delta = run.folder / run.step().deltas[-1].key
        whole = delta.read_bytes()
        delta.write_bytes(b"damaged")
        assert next(versions).version == 1
    assert told
    assert "the function `on_error` failed (ConnectionError: the chat is down)" in caplog.text


def test_errors_of_a_single_version_are_raised_and_a_wrong_key_too(folder, tmp_path):
    with pytest.raises(BucketError):
        next(follow_versions(f"{(tmp_path / 'nothing').as_uri()}#run", folder, once=True))
    with pytest.raises(KeyFormatError, match="is neither a key"):
        next(follow_versions("file:///x#run", folder, public_key="ed25519_secret_1"))


@pytest.mark.finding(13)
def test_follow_removes_what_was_half_built_before_it_looks(tmp_path, folder):
    run = Drifting(tmp_path / "bucket")
    building = folder / ".building"
    building.mkdir(parents=True)
    (building / ".0f0e0d.part").write_bytes(b"half")
    (folder / ".lock").touch()
    with CheckpointFolder(run.reader, folder):
        assert not building.exists()
    run.close()
