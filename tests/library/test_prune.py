"""What of a run is deleted, what never, and what is said of it afterwards."""

import os
import shutil
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import floats, integers, lists

from delta_weight_sync import Publisher
from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.errors import ConfigError
from delta_weight_sync.prune import GRACE_S, Keep, Pruner, Survey, _Clock, prune
from delta_weight_sync.reader import RunReader, open_run
from delta_weight_sync.records import Manifest, Writer, version_key
from delta_weight_sync.store import open_bucket
from inference_space.dashboard.data import Library
from tests.cli.command import command
from tests.support.real_run import PATIENCE_S, RUN, Drifting, is_built

HOUR = 3600.0
TEN_YEARS = 10 * 365 * 24 * HOUR
VERSIONS = 80


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run with anchors and jumps, which is only read."""
    run = Drifting(tmp_path_factory.mktemp("long") / "bucket")
    run.steps(VERSIONS)
    run.close()
    return run


@pytest.fixture
def run(long_run, tmp_path):
    """A copy of it whose versions were published ten minutes apart."""
    folder = tmp_path / "bucket"
    shutil.copytree(long_run.folder, folder)
    for path in folder.rglob("*"):
        if path.is_file():
            key = version_key(path.relative_to(folder).as_posix())
            os.utime(path, (600 * (key.version if key else VERSIONS),) * 2)
    return RunReader(open_bucket(folder.as_uri()), RUN)


def keys(reader: RunReader) -> set[str]:
    return {info.key for info in reader.bucket.list("")}


def size(reader: RunReader) -> int:
    return sum(info.size for info in reader.bucket.list(""))


def survey(reader: RunReader, keep: str, **spared: object) -> Survey:
    found = Pruner(reader, Keep.parse(keep)).survey(**spared)
    assert found
    return found


def test_a_run_fits_its_budget_and_all_that_it_still_holds_can_be_built(run, tmp_path):
    before = keys(run)
    found = survey(run, "600KB")
    prune(run.bucket, found)
    assert found.kept == size(run) <= 800e3
    assert 0 < found.oldest < VERSIONS - 10
    assert [m.version for m in run.versions()] == list(range(VERSIONS, found.oldest - 1, -1))
    for version in {found.oldest, found.oldest + 1, (found.oldest + VERSIONS) // 2, VERSIONS}:
        is_built(run, version, tmp_path)
    assert before - keys(run) == {doomed.info.key for doomed in found.delete}
    assert survey(run, "600KB").delete == (), "there is nothing more to do"


def test_what_a_trainer_goes_on_from_stays(run, tmp_path):
    old = VERSIONS - 30
    run.bucket.put(f"{run.keys.state(old, old, Writer(1, '0' * 32))}.json", b"{}")
    found = survey(run, "1KB")
    prune(run.bucket, found)
    assert found.oldest == old
    is_built(run, old, tmp_path)


def test_more_room_keeps_more_versions_and_one_more_would_not_fit(run):
    oldest = [survey(run, f"{kilobytes}KB").oldest for kilobytes in (500, 700, 900, 1100, 90000)]
    assert oldest == sorted(oldest, reverse=True)
    assert oldest[-1] == 0
    tight = survey(run, "800KB")
    assert survey(run, "800KB", reserve=100_000).oldest > tight.oldest


Published = dict[int, Manifest]


def set_clock(
    run: RunReader, monkeypatch: pytest.MonkeyPatch, newest: int, **wrong: dict[int, float]
) -> Published:
    """The trainer handed over a version every ten minutes, up to `newest`.

    `trainer`, `store`: version -> by how many seconds this clock was wrong meanwhile."""
    trainer = wrong.get("trainer", {})
    store = wrong.get("store", {})
    manifests = {
        m.version: m.model_copy(
            update={"created_at": TEN_YEARS + 600.0 * m.version + trainer.get(m.version, 0)}
        )
        for m in RunReader(run.bucket, RUN).versions()
    }
    monkeypatch.setattr(run, "newest", lambda: manifests[newest])
    monkeypatch.setattr(run, "read", lambda _, ref: manifests[version_key(ref.key).version])
    for info in run.bucket.list(""):
        key = version_key(info.key)
        number = min(key.version, newest) if key else newest
        date = TEN_YEARS + 600 * number + store.get(number, 0)
        os.utime(Path(run.bucket.url.removeprefix("file://")) / info.key, (date, date))
    return manifests


def test_by_age_the_versions_of_that_time_stay(run, monkeypatch):
    """Time is the run's own: its newest versions are the present, whenever that was."""
    set_clock(run, monkeypatch, VERSIONS)
    assert survey(run, "10h").oldest == VERSIONS - 60 - 2, "no time is believed without a second one"
    assert survey(run, "2d").oldest == 0


WRONG = [TEN_YEARS, -TEN_YEARS, 3 * HOUR, -3 * HOUR]


@pytest.mark.finding("M12")
@pytest.mark.parametrize("clocks", [["trainer"], ["trainer", "store"]])
@pytest.mark.parametrize("error", WRONG)
@pytest.mark.full
def test_a_clock_that_is_wrong_for_one_version_deletes_nothing(run, monkeypatch, error, clocks):
    """In a folder, both clocks are often the same."""
    at = 60
    hours = 5
    for newest in (at, at + 1, at + 2, at + 3, at + 15, VERSIONS):
        set_clock(run, monkeypatch, newest, **{clock: {at: error} for clock in clocks})
        oldest = survey(run, f"{hours}h").oldest
        right = newest - 6 * hours
        assert oldest <= right, f"version {newest} is the newest"
        assert oldest >= right - 4 or newest < at + 2, "the next versions make up for it"


@pytest.mark.finding("M12")
def test_a_trainers_clock_that_is_wrong_for_long_deletes_nothing_that_the_stores_protects(run, monkeypatch):
    for error in WRONG:
        set_clock(run, monkeypatch, 60, trainer=dict.fromkeys(range(50, 61), error))
        assert survey(run, "5h").oldest <= 60 - 30


@pytest.mark.finding("M12")
@pytest.mark.parametrize("error", WRONG)
def test_what_readers_may_still_fetch_stays_whatever_one_time_of_the_store_says(run, monkeypatch, error):
    at = 60
    for newest in (at, at + 1, at + 2, at + 3):
        manifests = set_clock(run, monkeypatch, newest, store={at: error})
        young = {ref.key for version in range(newest - 5, newest + 1) for ref in manifests[version].files}
        doomed = {one.info.key for one in survey(run, "1KB").delete}
        assert doomed or newest < at + 2
        assert not doomed & young, "named less than an hour ago"


@pytest.mark.finding("M12")
def test_a_version_from_the_future_is_deleted_with_its_neighbours(run, monkeypatch):
    with monkeypatch.context() as patched:
        set_clock(run, patched, VERSIONS, trainer={60: TEN_YEARS}, store={60: TEN_YEARS})
        prune(run.bucket, found := survey(run, "1KB"))
    assert found.oldest == VERSIONS - 7
    assert command("verify", run.bucket.url).code == 0


@pytest.mark.finding("M12")
@given(gaps=lists(floats(0, 1e9), min_size=1), wrong=integers(0), error=floats(-1e10, 1e10))
def test_no_age_is_too_large_whichever_time_is_wrong(gaps, wrong, error):
    right = [*accumulate(gaps)]
    shown = [time + error * (number == wrong % len(right)) for number, time in enumerate(right)]
    clock = _Clock()
    for real, time in zip(right[::-1], shown[::-1], strict=True):
        assert clock.age(time) <= right[-1] - real + 1e-3


def test_what_the_newest_and_young_versions_name_stays_whatever_the_budget(run):
    found = survey(run, "1KB")
    prune(run.bucket, found)
    # Five versions are less than an hour old. No time is believed without a second one, so two more may be.
    assert found.oldest == VERSIONS - 7
    there = keys(run)
    for manifest in run.versions():
        assert {ref.key for ref in manifest.files} <= there
    assert len(list(run.versions())) == 8


def test_objects_on_their_way_stay_and_orphans_go(run):
    """A writer that died left version 30's; the one that is alive is about to publish the next."""
    newest = run.manifest()
    owner = Writer(newest.writer_term, newest.writer)
    dead = Writer(1, "f" * 32)
    coming = run.keys.delta(VERSIONS + 1, owner)
    offered = run.keys.jump(40, 48, dead)
    orphan = run.keys.delta(30, dead)
    fresh = run.keys.anchor(31, dead, "model.safetensors")
    for key in (coming, offered, orphan, fresh):
        run.bucket.put(key, b"x")
        age = 600 * VERSIONS - (60 if key == fresh else 2 * HOUR)
        os.utime(Path(run.bucket.url.removeprefix("file://")) / key, (age, age))
    doomed = {one.info.key: one.why for one in survey(run, "90MB", spare=[offered]).delete}
    assert doomed[orphan] == "no remaining version needs it"
    assert not doomed.keys() & {coming, offered, fresh}


def test_what_is_no_part_of_a_version_is_never_deleted(run):
    run.bucket.put(f"{run.keys.folder}notes.txt", b"mine")
    kinds = {version_key(doomed.info.key).kind for doomed in survey(run, "1KB").delete}
    assert kinds == {"anchors", "deltas", "jumps", "manifests"}


def test_a_gc_that_is_killed_is_finished_by_the_next(run, tmp_path):
    found = survey(run, "600KB")
    for stop in range(0, len(found.delete), 37):
        run.bucket.delete([doomed.info.key for doomed in found.delete[:stop]])
        oldest = min(m.version for m in run.versions())
        if stop % 3 == 0:
            is_built(run, oldest, tmp_path / f"{stop}")
    prune(run.bucket, survey(run, "600KB"))
    assert size(run) <= 800e3


def test_gc_says_what_it_would_delete_and_why_and_deletes_it(run):
    url = f"{run.bucket.url}#{RUN}"
    before = keys(run)
    dry = command("gc", url, "--keep", "800KB", "--dry-run")
    assert (dry.code, dry.complaint, keys(run)) == (0, "", before)
    *lines, summary = dry.output.splitlines()
    assert lines[0].endswith("older than version " + summary.split("versions ")[1].split()[0])
    done = command("gc", url, "--keep", "800KB")
    assert done.output == summary.replace("would be deleted", "deleted") + "\n"
    assert {line.split()[1] for line in lines} == before - keys(run)


def test_what_is_below_a_missing_manifest_stays_as_long_as_the_budget_allows(run):
    run.bucket.delete([next(key for key in keys(run) if "/manifests/00000040." in key)])
    before = {key for key in keys(run) if "/manifests/" in key}
    assert command("gc", run.bucket.url, "--keep", "90MB").code == 0
    assert {key for key in keys(run) if "/manifests/" in key} == before
    assert "the manifest of version 40 is missing" in command("verify", run.bucket.url).complaint
    stray = {key: run.bucket.get(key) for key in keys(run) if "/manifests/00000005." in key}
    prune(run.bucket, survey(run, "600KB"))
    run.bucket.put_all([*stray.items()])  # of a trainer that had lost the run; its files are gone
    assert command("verify", run.bucket.url).code == 0


@pytest.mark.parametrize("keep", ["20", "GB", "-1GB", "0GB", "7w", ""])
def test_what_cannot_be_kept_is_refused(keep):
    with pytest.raises(ConfigError, match="write it as 20GB, 7d or 12h"):
        Keep.parse(keep)


def test_a_budget_that_is_too_small_says_so(run):
    assert "which is more than 1KB" in command("gc", run.bucket.url, "--keep", "1KB").output


def test_every_command_copes_with_versions_that_are_gone(run):
    url = run.bucket.url
    prune(run.bucket, found := survey(run, "600KB"))
    said = f"older versions were deleted; {found.oldest} is the oldest available"
    assert command("log", url).output.splitlines()[-1] == said
    verified = command("verify", url)
    assert (verified.code, verified.complaint) == (0, "")
    assert f"all {VERSIONS - found.oldest + 1} versions verified" in verified.output
    shown = command("show", url, "--version", "3")
    assert shown.code == 1
    assert shown.complaint.endswith(f"no longer has version 3; the oldest available is {found.oldest}\n")
    library = Library(run.bucket, lambda: RUN)
    for ask in (run.manifest, library.verify, library.delta):
        with pytest.raises(ValueError, match="no longer has version 3"):
            ask(3)
    assert "the published digest" in library.verify(found.oldest)
    assert library.digests({3, VERSIONS}) == {VERSIONS: run.manifest().digest}


def test_a_publisher_prunes_only_what_no_reader_can_need(tmp_path, monkeypatch):
    """Its objects are all less than an hour old."""
    run = Drifting(tmp_path / "bucket", keep=Keep(size=1.0))
    run.steps(20)
    assert len(list(RunReader(open_bucket(run.url), RUN).versions())) == 21
    monkeypatch.setattr(run.outbox.shortcuts._pruner, "_grace_s", 0.0)
    reader = RunReader(open_bucket(run.url), RUN)
    with (
        CheckpointFolder(reader, tmp_path / "often") as often,
        CheckpointFolder(reader, tmp_path / "rarely") as rarely,
    ):
        for step in range(30):
            run.step()
            run.settle()
            often.update(reader.manifest())
            if step % 13 == 3:
                rarely.update(reader.manifest())  # its deltas were deleted meanwhile
    assert often.held == run.newest
    assert len(list(reader.versions())) <= 9
    is_built(reader, run.newest.version, tmp_path / "joins")
    run.close()
    assert GRACE_S == HOUR


def test_a_run_in_any_store_is_pruned(bucket_url, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = {"w": torch.zeros(100, 40)}
    with Publisher(f"{bucket_url}#r", tmp_path) as publisher:
        for step in range(11):
            weights["w"][step] += 1
            publisher.publish(weights.items())
            publisher.flush()
            assert publisher._outbox.shortcuts.idle(PATIENCE_S)
    reader = open_run(f"{bucket_url}#r")
    assert survey(reader, "1KB").delete == (), "all of it is young"
    found = Pruner(reader, Keep(size=1.0), grace_s=0.0).survey()
    prune(reader.bucket, found)
    assert [m.version for m in reader.versions()] == [10]
    assert not keys(reader) & {doomed.info.key for doomed in found.delete}
    is_built(reader, 10, tmp_path)
