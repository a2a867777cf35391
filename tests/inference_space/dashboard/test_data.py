"""One reader follows the bucket through everything that can happen to it, and reads once for all viewers."""

import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import pytest
import zstandard
from fastapi import FastAPI, Response
from starlette.testclient import TestClient

from delta_weight_sync.errors import BucketUnreachableError, ObjectMissingError, ProtocolError
from delta_weight_sync.records import Manifest, RunInfo
from delta_weight_sync.runlog import CommitEvent, ReplicaEvent, ReplicaReport
from delta_weight_sync.store import SMALL, Bucket, ObjectInfo, open_bucket
from inference_space.dashboard import data, views
from inference_space.dashboard.data import (
    BYTES,
    CALLS,
    FAILED_S,
    MAX_REBUILD,
    WINDOW_S,
    AnswerCache,
    Library,
    RateLimitedBucket,
    RateLimitError,
    RunCache,
    RunView,
)
from inference_space.dashboard.page import add_views, render
from inference_space.dashboard.remote import RemoteReplica
from tests.support.buckets import CountedBucket
from tests.support.hubsim import HubSim
from tests.support.real_run import RealRun
from tests.support.records import WRITER, manifest_of, put_flush, status
from tests.support.serving import serving
from tests.support.waiting import PATIENCE_S, soon
from tests.support.written_run import WrittenRun, digest_of


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "EVERY_S", 0.02)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(f"file://{tmp_path}/bucket", create=True)


def until(cache: RunCache, wanted: Callable[[RunView], bool]) -> RunView:
    soon(lambda: wanted(cache.view()), cache.view)
    return cache.view()


def version(view: RunView) -> int | None:
    return view.progress.version if view.progress else None


def matching(view: RunView) -> list[bool | None]:
    """For each replica, whether its bits are the published ones."""
    return [view.progress.matches(replica.status) for replica in view.progress.replicas]


def started(
    bucket: Bucket,
    run: str = "wordle",
    *,
    versions: int = 2,
    created_at: float = 1e9,
    log_every_s: float = 0.1,
) -> WrittenRun:
    written = WrittenRun(bucket, run, created_at=created_at, log_every_s=log_every_s)
    for _ in range(versions + 1):
        written.publish(40_000, 2_000)
    if log_every_s < 1:
        written.log.flush()
    return written


def real_run(bucket: Bucket, versions: int = 1) -> RealRun:
    """A small run that ended at its version `versions`."""
    run = RealRun(bucket, run="r", layers=1, width=4)
    for _ in range(versions):
        run.step()
    run.close()
    return run


class Pauses:
    """The pauses of a reader, which end when the test says so."""

    def __init__(self) -> None:
        self._begun, self._over = queue.Queue[float](), queue.Queue[None]()

    def __call__(self, until: threading.Event, seconds: float) -> None:
        self._begun.put(seconds)
        self._over.get()

    def begun(self) -> float:
        """Wait until the reader pauses; return for how long it would."""
        return self._begun.get(timeout=PATIENCE_S)

    def end(self) -> None:
        """Let the reader go on."""
        self._over.put(None)


class BrokenBucket:
    """A bucket whose log fails while it is `broken`; its second flush is held back until it is `free`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.url = bucket.url
        self.broken = False
        self.free = threading.Event()
        self.parts = 0
        self.free.set()

    def get(self, key: str, limit: int = SMALL) -> bytes:
        if self.broken and "/log/" in key:
            raise BucketUnreachableError(f"{key} cannot be reached: try again")
        assert not key.endswith(".00000001.jsonl.zst") or self.free.wait(PATIENCE_S)
        found = self._bucket.get(key, limit)
        self.parts += "/log/" in key
        return found

    def __getattr__(self, name: str):
        return getattr(self._bucket, name)


def test_an_empty_bucket_becomes_a_run(bucket: Bucket) -> None:
    cache = RunCache(bucket, None)
    empty = until(cache, lambda view: view.read)
    assert (empty.read, empty.problem, empty.run, empty.progress) == (True, None, None, None)
    info = RunInfo(run="wordle", model="m", created_at=1.0, full_bytes=1)
    bucket.put("runs/wordle/run.json", info.to_bytes())
    waiting = until(cache, lambda view: view.run == "wordle")
    assert (waiting.progress, waiting.problem) == (None, None)
    written = started(bucket)
    view = until(cache, lambda view: version(view) == 2)
    assert (view.run, view.model) == ("wordle", "Qwen/Qwen3-0.6B")
    written.log.close()


def test_the_run_created_last_is_shown_unless_one_is_named(bucket: Bucket) -> None:
    for name, created_at in (("b-old", 1.0), ("a-new", 2.0)):
        started(bucket, name, created_at=created_at).log.close()
    assert until(RunCache(bucket, None), lambda view: version(view) == 2).run == "a-new"
    assert until(RunCache(bucket, "b-old"), lambda view: version(view) == 2).run == "b-old"


def test_digests_come_from_the_manifests(bucket: Bucket) -> None:
    written = started(bucket, versions=4)
    written.commit("same", 4)
    written.commit("late", 2)
    written.log.append(written.commit_event("wrong", 3).model_copy(update={"digest": digest_of(99)}))
    written.log.close()
    progress = until(RunCache(bucket, "wordle"), lambda view: version(view) == 4).progress
    assert progress
    matching = {r.status.replica: progress.matches(r.status) for r in progress.replicas}
    assert matching == {"same": True, "late": True, "wrong": False}
    bucket.put(written.keys.manifest(3, WRITER), b"damaged")
    assert Library(bucket, lambda: "wordle").digests({2, 3}) == {2: digest_of(2)}


def test_the_replica_that_hosts_the_dashboard_is_asked_directly(bucket: Bucket) -> None:
    """Its status takes no detour over the trainer and the bucket, and is shown while the bucket is gone."""
    written = started(bucket)
    written.status("mine", 0)
    written.log.close()
    own = status("mine", 1).model_copy(update={"digest": digest_of(1)})
    flaky = BrokenBucket(bucket)
    pauses = Pauses()
    cache = RunCache(flaky, None, reports=[lambda _: ReplicaReport(status=own, commits=())], pause=pauses)

    def after(**changed: object) -> RunView:
        """The view after another reading, with these changes of the replica's status."""
        nonlocal own
        own = own.model_copy(update=changed)
        cache.view()
        pauses.end()
        pauses.begun()
        return cache.view()

    def mine(view: RunView) -> tuple[int | None, str | None, bool | None]:
        (replica,) = view.progress.replicas
        return replica.status.version, replica.status.error, view.progress.matches(replica.status)

    pauses.begun()
    first = cache.view()
    assert mine(first) == (1, None, True)
    assert after(t=9.0).progress is first.progress, "a later time alone is not news"
    flaky.broken = True
    view = after(error="disk full")
    assert mine(view) == (1, "disk full", True)
    assert view.problem


class TwoReplicas:
    """A vLLM with the plugin and a Space, as their servers answer; and what each was asked."""

    def __init__(self) -> None:
        self.asked = dict[str, list[int]]()
        self.app = FastAPI()
        self.size = 0  # bytes by which an answer is too large
        self.host = ""  # the name of both; else, each has that of its place
        for place, path in {"a": "delta_weight_sync/status", "b": "status"}.items():
            self.app.get(f"/{place}/{path}")(functools.partial(self.answer, place))

    async def answer(self, place: str, after: int) -> Response:
        self.asked.setdefault(place, []).append(after)
        name = self.host or place
        status = ReplicaEvent(t=1.0, replica=name, state="serving", version=2, digest=digest_of(2))
        times = {"fetch_s": 0.1, "stage_s": 0.1, "pause_ms": 0.5, "commit_ms": 0.4}
        commits = [
            CommitEvent(t=1.0 + n, replica=name, version=n, digest=digest_of(n), lag_s=1.0, **times)
            for n in (1, 2)
            if n > after
        ]
        report = ReplicaReport(status=status, commits=commits)
        return Response(report.model_dump_json() + " " * self.size)


def test_replicas_are_asked_where_no_trainer_logs_them(bucket: Bucket) -> None:
    """Of any trainer: it only publishes. A replica that gives no answer is shown as such."""
    written = started(bucket)
    written.log.close()
    replicas = TwoReplicas()
    pauses = Pauses()
    with serving(replicas.app) as url:
        places = [f"{url}/a", f"{url}/b/", f"{url}/c"]
        reports = [RemoteReplica(place) for place in places]
        cache = RunCache(bucket, None, reports=reports, pause=pauses)
        for _ in range(2):
            pauses.begun()
            view = cache.view()
            pauses.end()
        pauses.begun()
        shown = {r.status.replica: (r.status.version, r.status.state) for r in view.progress.replicas}
        assert shown == {
            "a": (2, "serving"),
            "b": (2, "serving"),
            places[2]: (None, "unreachable"),
        }
        assert replicas.asked["a"][:2] == [-1, 2], "each commit is sent once"
        assert view.progress.pause_ms == 0.5
        assert len(view.progress.curves["pauses"]) == 4, "versions 1 and 2 of both replicas"
        assert all(view.progress.matches(r.status) for r in view.progress.replicas if r.status.version)
        replicas.size = 5 << 20
        assert reports[0](2).status.state == "unreachable", "its answer has no end"


def test_replicas_of_one_name_are_shown_apart(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    written = started(bucket)
    written.log.close()
    replicas = TwoReplicas()
    monkeypatch.setattr(replicas, "host", "box")
    with serving(replicas.app) as url:
        reports = [RemoteReplica(f"{url}/{place}") for place in "ab"]
        cache = RunCache(bucket, None, reports=reports)
        view = until(cache, lambda view: version(view) == 2)
    assert view.progress
    shown = [(r.status.replica, r.status.version, [n for n, _ in r.lags]) for r in view.progress.replicas]
    assert shown == [("box", 2, [1, 2]), (f"box ({url}/b)", 2, [1, 2])]


@pytest.mark.full
def test_another_run_of_the_bucket_is_drawn_beside_this_one(bucket: Bucket) -> None:
    first = WrittenRun(bucket, run="first")
    second = WrittenRun(bucket, run="second")
    for run in (first, second):
        run.publish(440_000, 220_000)
        for step in (1, 2, 3):
            run.publish(40_000, 2_000)
            run.step(step, 0.1 * step)
    first.log.close()
    cache = RunCache(bucket, "second", compare="first")
    view = until(cache, lambda view: view.other is not None and version(view) == 3)
    assert view.other
    assert (view.run, view.other[0], view.other[1].version) == ("second", "first", 3)
    page = render(view)
    assert page.count(">first</b>") == 2, "in the panels of the reward and of the changed weights"
    assert ">first: deltas</b>" in page
    assert page.count('class="line other') == 3
    first.publish(40_000, 2_000)
    first.log.flush()
    until(cache, lambda view: view.other is not None and view.other[1].version == 4)
    second.log.close()


def test_a_damaged_description_is_named_and_the_figures_stay_until_it_is_repaired(bucket: Bucket) -> None:
    written = started(bucket)
    key = "runs/wordle/run.json"
    cache = RunCache(bucket, "wordle")
    until(cache, lambda view: version(view) == 2)
    sound = bucket.get(key)
    bucket.put(key, sound[:-1])
    view = until(cache, lambda view: view.problem is not None)
    assert key in str(view.problem)
    assert version(view) == 2
    assert "bucket not readable" in render(view)
    bucket.put(key, sound)
    written.publish(40_000, 2_000)
    written.log.close()
    assert until(cache, lambda view: version(view) == 3).problem is None


def test_a_run_that_starts_over_is_read_again(bucket: Bucket) -> None:
    started(bucket, versions=5).log.close()
    cache = RunCache(bucket, "wordle")
    until(cache, lambda view: version(view) == 5)
    bucket.delete([info.key for info in bucket.list("runs/")])
    until(cache, lambda view: view.progress is None)
    started(bucket, versions=1, created_at=2e9).log.close()
    assert until(cache, lambda view: version(view) == 1).problem is None


def test_the_first_reading_shows_its_progress(bucket: Bucket) -> None:
    written = started(bucket, versions=3, log_every_s=3600)
    for step in range(512):
        written.step(step, 0.5)
    written.log.flush()
    written.step(512, 0.5)
    written.log.close()
    stuck = BrokenBucket(bucket)
    stuck.free.clear()
    cache = RunCache(stuck, None)
    soon(lambda: cache.view().events_read == 512)
    assert "Reading run 'wordle' …" in render(cache.view())
    assert "<b>512 events</b> so far" in render(cache.view())
    stuck.free.set()
    assert until(cache, lambda view: version(view) == 3).events_read == 0


def test_a_failed_reading_continues_where_it_stopped(bucket: Bucket) -> None:
    written = started(bucket)
    flaky = BrokenBucket(bucket)
    cache = RunCache(flaky, "wordle")
    until(cache, lambda view: version(view) == 2)
    flaky.broken = True
    written.publish(40_000, 2_000)
    written.log.close()
    assert until(cache, lambda view: view.problem is not None).progress
    flaky.broken = False
    before = flaky.parts
    until(cache, lambda view: version(view) == 3)
    assert flaky.parts - before == 1, "only the part that is new"


def test_reading_does_not_depend_on_the_number_of_viewers(bucket: Bucket) -> None:
    started(bucket).log.close()
    counted = CountedBucket(bucket)
    pauses = Pauses()
    cache = RunCache(counted, "wordle", pause=pauses)
    assert pauses.begun() == data.EVERY_S
    first = counted.asked.total()

    views = [cache.view() for _ in range(500)]
    assert {version(view) for view in views} == {2}
    assert len({id(view) for view in views}) == 1, "an unchanged view is the same object, rendered once"
    assert counted.asked.total() == first, "looking reads nothing"

    pauses.end()
    assert pauses.begun() == data.EVERY_S, "somebody looked, so it was read again after a second"
    again = counted.asked.total() - first
    assert again <= 3
    assert cache._view is views[0]

    pauses.end()
    assert pauses.begun() == data.IDLE_S, "nobody looked since"
    assert counted.asked.total() - first == again


@pytest.mark.finding(11)
def test_lines_that_are_not_events_are_counted_on_the_page(bucket: Bucket) -> None:
    started(bucket, "r").log.close()
    put_flush(bucket, "r", [b'{"t":1e300}', b'{"t":NaN}'], number=100)
    view = until(RunCache(bucket, "r"), lambda view: view.skipped == 2)
    assert view.progress
    assert view.problem is None
    assert "2 lines of its log skipped" in render(view)


@pytest.mark.finding(11)
def test_a_damaged_description_hides_no_other_run(bucket: Bucket) -> None:
    sound = RunInfo(run="sound", model="m", created_at=1.0, full_bytes=1)
    bucket.put("runs/sound/run.json", sound.to_bytes())
    bucket.put("runs/broken/run.json", b"?")
    bucket.put("runs/large/run.json", b" " * (9 << 20))
    bucket.put("runs/liar/run.json", sound.model_copy(update={"created_at": 2.0}).to_bytes())
    assert data.newest_run(bucket) == sound


@pytest.mark.finding(13)
def test_a_stale_read_of_head_does_not_move_the_page_back(bucket: Bucket) -> None:
    run = RealRun(bucket, layers=1)
    (head,) = (info.key for info in bucket.list("runs/real/heads/"))
    old = bucket.get(head)
    counted = CountedBucket(bucket)
    run.step()
    run.step()
    cache = RunCache(counted, None)
    until(cache, lambda view: version(view) == 2 and all(matching(view)))
    bucket.put(head, old)
    looked = counted.asked["stat"] + 10
    view = until(cache, lambda view: counted.asked["stat"] > looked)
    assert (version(view), matching(view)) == (2, [True])
    run.close()


def test_fifty_viewers_of_a_delta_cost_one_download(bucket: Bucket) -> None:
    run = real_run(bucket)
    counted = CountedBucket(bucket)
    library = Library(counted, lambda: "r", clock=lambda: 0.0)
    answers: list[object] = []
    viewers = [threading.Thread(target=lambda: answers.append(library.delta(1)[1])) for _ in range(50)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert len(answers) == 50
    assert counted.asked["fetch"] == counted.asked["get"] == counted.asked["list"] == 1
    assert library.delta(1)[1].changes == run.reader.manifest(1).changed


@pytest.mark.finding(8)
def test_a_damaged_version_is_fetched_once(bucket: Bucket) -> None:
    counted = CountedBucket(bucket)
    delta = real_run(bucket).reader.manifest().deltas[-1]
    bucket.put(delta.key, b"?" * delta.size)
    library = Library(counted, lambda: "r")
    for _ in range(10):
        with pytest.raises(ProtocolError, match="is not the published object"):
            library.verify(1)
    assert counted.fetched[delta.key] == 1


@pytest.mark.finding(8)
def test_a_failure_is_cached_for_a_limited_time() -> None:
    now = [0.0]
    calls = list[str]()

    def fail(question: str) -> str:
        calls.append(question)
        raise ProtocolError("it is damaged") from ValueError(question)

    ask = AnswerCache(fail, 10, clock=lambda: now[0])
    for now[0] in (0.0, FAILED_S, FAILED_S + 1):
        with pytest.raises(ProtocolError):
            ask("x")
    assert len(calls) == 2
    for number in range(2000):
        with pytest.raises(ProtocolError):
            ask(f"{number}")
    assert len(ask._kept) <= 1024
    assert not any(error.__traceback__ or error.__cause__ for error, *_ in ask._kept.values())


@pytest.mark.finding(8)
def test_answers_are_evicted_by_weight() -> None:
    worked = list[int]()

    def work(question: int) -> int:
        worked.append(question)
        return question

    ask = AnswerCache(work, 10, weigh=lambda answer: answer)
    kept = []
    for question in (4, 5, 4, 3, 4, 5, 100):
        assert ask(question) == question
        kept.append([*ask._kept])
    assert worked == [4, 5, 3, 5, 100]
    assert kept == [[4], [4, 5], [5, 4], [4, 3], [3, 4], [4, 5], [100]]


@pytest.mark.finding(8)
def test_the_size_that_a_manifest_states_is_not_trusted(bucket: Bucket, monkeypatch) -> None:
    """`full_bytes` is a number; the sizes of its files are what is fetched."""
    manifest = manifest_of(0, 0)
    counted = CountedBucket(bucket)
    file = manifest.anchor.files[0].model_copy(update={"size": MAX_REBUILD + 1})
    anchor = manifest.anchor.model_copy(update={"files": (file,)})
    forged = Manifest(**dict(manifest) | {"seal": "", "anchor": anchor, "full_bytes": 2})
    monkeypatch.setattr(Library, "_manifest", lambda *_: forged)
    with pytest.raises(ProtocolError, match="too large to be rebuilt here"):
        Library(counted, lambda: "r").verify(0)
    monkeypatch.setattr(Library, "_manifest", lambda *_: manifest_of(CALLS, 0))
    with pytest.raises(ProtocolError, match="run delta-weight-sync verify"):
        Library(counted, lambda: "r").verify(CALLS)
    assert not counted.fetched


def test_a_download_is_deleted_after_its_last_use(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_DISK", 1)
    bucket.put("runs/r/log/x", b"one")
    bucket.put("runs/r/log/y", b"two")
    counted = CountedBucket(bucket)
    library = Library(counted, lambda: "r")
    sending = library.download("runs/r/log/x")
    assert library.download("runs/r/log/x") is sending
    assert counted.fetched == {"runs/r/log/x": 1}
    path = library.download("runs/r/log/y").path
    assert path.read_bytes() == b"two"
    assert sending.path.read_bytes() == b"one", "although it made room for another"
    folder = sending.path.parent
    del sending
    assert not folder.exists()


@pytest.mark.finding("N9")
@pytest.mark.parametrize("name", ["state/1/rank-0.safetensors", "state/1.json", "anchors/0/config.json", "x"])
def test_a_visitor_downloads_neither_models_nor_states(bucket: Bucket, name: str) -> None:
    bucket.put(f"runs/r/{name}", b"x")
    with pytest.raises(ObjectMissingError, match="downloaded here: run 'r' lacks it, or visitors may not"):
        Library(bucket, lambda: "r").download(f"runs/r/{name}")
    assert "/dashboard/object?" not in views.listing(bucket.list("runs/r/"), "r", 0)


@pytest.mark.finding("N10")
def test_a_long_listing_costs_its_pages_and_is_asked_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_space.dashboard.data.LIST_EVERY_S", 5.0)  # the served page's is shorter
    now = [0.0]
    asked = []
    many = [ObjectInfo(f"runs/r/log/{number}", 1, "x") for number in range(20_000)]
    listing = SimpleNamespace(url="file:///b", list=lambda prefix: asked.append(prefix) or many)
    limited = RateLimitedBucket(cast(Bucket, listing), lambda: now[0])
    library = Library(cast(Bucket, limited), lambda: "r", lambda: now[0])
    for _ in range(60):
        library.objects()
        now[0] += 5.0
    assert len(asked) < 4
    limited = RateLimitedBucket(cast(Bucket, listing), lambda: now[0])
    for _ in range(1 + CALLS // 21):
        limited.list("runs/r/")
    with pytest.raises(RateLimitError):
        limited.list("runs/r/")


@pytest.mark.finding(8)
def test_visitors_share_a_limit_on_requests_and_bytes(bucket: Bucket, tmp_path: Path) -> None:
    now = [0.0]
    counted = CountedBucket(bucket)
    bucket.put("runs/r/x", b"x")
    limited = RateLimitedBucket(counted, lambda: now[0])
    for _ in range(CALLS):
        limited.stat("runs/r/x")
    with pytest.raises(RateLimitError, match="try again in 2 s"):
        limited.get("runs/r/x")
    now[0] += WINDOW_S / CALLS
    assert limited.get("runs/r/x") == b"x"
    now[0] += WINDOW_S
    limited.fetch("runs/r/x", tmp_path / "x", BYTES)
    with pytest.raises(RateLimitError, match=r"2 GB .* try again in 300 s"):
        limited.fetch("runs/r/x", tmp_path / "x", BYTES // 2)
    with pytest.raises(ProtocolError, match="too large for this page"):  # waiting would not help
        limited.fetch("runs/r/x", tmp_path / "x", BYTES + 1)
    assert counted.fetched["runs/r/x"] == 1
    assert not hasattr(limited, "put")


class TestHubQuota:
    """What visitors make the dashboard ask of the Hub, whose quota is for replicas and the trainer."""

    pytestmark = pytest.mark.finding(9)
    FREE = 1000  # requests to the API that a free user has in five minutes
    OBJECTS = 300

    @pytest.fixture
    def bucket(self, hub: HubSim, hub_env: None) -> Bucket:
        bucket = open_bucket(f"hf://buckets/team/{uuid4().hex}", create=True)
        real_run(bucket)
        return bucket

    @pytest.fixture
    def pauses(self) -> Pauses:
        return Pauses()

    @pytest.fixture
    def visitor(self, bucket: Bucket, pauses: Pauses) -> Iterator[TestClient]:
        """The dashboard's routes; its own reader has read the run once, and pauses."""
        cache = RunCache(bucket, None, pause=pauses)
        app = FastAPI()
        pauses.begun()
        limited = RateLimitedBucket(bucket, lambda: 0.0)  # no time passes: the limit stays used up
        add_views(app, cache, Library(limited, lambda: "r", lambda: 0.0))
        with TestClient(app) as visitor:
            yield visitor

    @staticmethod
    def requests(hub: HubSim, work: Callable[[], object]) -> tuple[int, int]:
        """The requests that `work` makes: to the API, which has the smaller quota, and all of them."""
        before = len(hub.requests())
        work()
        kinds = Counter("api" if "/api/" in request else "other" for request in hub.requests()[before:])
        return kinds["api"], kinds.total()

    @staticmethod
    def look(visitor: TestClient, pauses: Pauses, times: int) -> None:
        """The page is open while the dashboard reads the bucket that often."""
        for _ in range(times):
            visitor.get("/dashboard/explain")
            pauses.end()
            pauses.begun()

    @pytest.mark.long
    def test_many_objects_cost_no_more_than_the_limit(self, bucket, hub, visitor) -> None:
        files = [(b"%d" % number, f"runs/r/log/{number}") for number in range(self.OBJECTS)]
        bucket._api.batch_bucket_files(bucket._id, add=files)
        answers = []

        def download() -> None:
            answers.extend(visitor.get(f"/dashboard/object?key={key}") for _, key in files)

        assert self.requests(hub, download)[0] < self.FREE * 0.5  # a window of the Hub's can have half more
        assert [answer.status_code for answer in answers[:100]] == [200] * 100
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) >= self.OBJECTS - CALLS
        assert {answer.status_code for answer in refused} == {429}
        assert "visitors have used up the 240 reads" in refused[0].text
        assert visitor.get("/dashboard/bucket").status_code == 200

    def test_a_page_that_is_open_costs_no_requests_to_the_api(self, hub, visitor, pauses) -> None:
        for _ in range(2):
            pauses.end()
            pauses.begun()
        api, requests = self.requests(hub, lambda: self.look(visitor, pauses, 10))
        assert api == 0
        assert requests <= 30

    def test_a_version_that_never_was_is_not_looked_up_for_ever(self, bucket, hub, visitor, pauses) -> None:
        for info in bucket.list("runs/r/log/"):
            lines = zstandard.decompress(bucket.get(info.key)).replace(b'"version":1,', b'"version":99,')
            bucket.put(info.key, zstandard.compress(lines))
        self.look(visitor, pauses, 30)
        assert self.requests(hub, lambda: self.look(visitor, pauses, 10))[0] == 0
