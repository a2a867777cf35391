"""Tags: which are believed, what they keep, and where they stand for a version."""

import shutil

import pytest

from delta_weight_sync import ConfigError, NoVersionError, ProtocolError, Run, SignatureError, follow
from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, new_pair
from delta_weight_sync.store import open_bucket
from tests.cli.command import command
from tests.support.published_run import write_run
from tests.support.real_run import RUN, Drifting, is_built


@pytest.fixture
def url(tmp_path):
    url = (tmp_path / "bucket").as_uri()
    write_run(url, tmp_path / "base", versions=4)
    return f"{url}#test"


@pytest.fixture
def pair(monkeypatch):
    """The keys of a signed run, in this process."""
    pair = new_pair()
    for name, key in pair.items():
        monkeypatch.setenv(name, key)
    return pair


def test_a_tag_is_accepted_wherever_a_version_is(url, tmp_path):
    run = Run(url)
    tag = run.tag(1, "best")
    assert (tag.version, tag.digest, tag.signature) == (1, run.manifest(1).digest, "")
    assert run.manifest("best").version == 1
    assert run.checkout(tmp_path / "best", "best").version == 1
    assert [manifest.version for manifest in run.verify("best")] == [1]
    assert [version.version for version in follow(run, tmp_path / "followed", version="best")] == [1]
    assert [diff.name for diff in run.diff("best", 2)] == [diff.name for diff in run.diff(1, 2)]
    run.tag("best", "release")
    run.tag(None, "best")
    assert [(tag.name, tag.version) for tag in run.tags()] == [("best", 3), ("release", 1)]
    run.untag("best")
    assert [tag.name for tag in run.tags()] == ["release"]


def test_commands_take_tags(url, tmp_path):
    assert "has the tag best, not signed" in command("tag", url, 2, "best").output
    assert command("tag", url).output.split()[-3:] == ["2", Run(url).manifest(2).digest, "best"]
    assert "version 2" in command("checkout", url, "--version", "best", "--out", tmp_path / "out").output
    assert command("verify", url, "--version", "best").output.startswith("version 2 ok")
    found = command("bisect", url, "--good", "best", "--eval", "test {version} -lt 3").output
    assert "version 3 is the first bad one" in found
    assert command("tag", url, "--remove", "best").code == 0
    assert "has no tag 'best'" in command("tag", url, "--remove", "best").complaint
    assert "name the tag" in command("tag", url, 2).complaint


@pytest.mark.parametrize("name", ["41", "", ".best", "a/b", "-x", "a" * 65, "tag\n"])
def test_a_name_that_looks_like_a_version_or_a_path_is_refused(url, name):
    with pytest.raises(ConfigError, match="begin with a letter"):
        Run(url).tag(1, name)


def test_a_tag_that_the_run_does_not_have_is_one_sentence(url):
    run = Run(url)
    with pytest.raises(NoVersionError, match="has no tag 'best': `delta-weight-sync tag"):
        run.manifest("best")
    with pytest.raises(NoVersionError, match="no version 9"):
        run.tag(9, "best")


def test_a_signed_run_believes_only_signed_tags(pair, tmp_path, monkeypatch):
    place = (tmp_path / "bucket").as_uri()
    write_run(place, tmp_path / "base", versions=3)
    run = Run(f"{place}#test")
    assert run.tag(1, "best").signature
    monkeypatch.delenv(SIGNING_KEY)
    monkeypatch.delenv(PUBLIC_KEY)
    with pytest.raises(ConfigError, match="refuse an unsigned tag: set DELTA_WEIGHT_SYNC_SIGNING_KEY"):
        Run(f"{place}#test").tag(2, "mine")
    bucket = open_bucket(place)
    tag = run._reader.tag("best", run.manifest())
    forged = type(tag)(
        **tag.model_dump(exclude={"name", "seal", "signature"}), name="forged"
    )  # what a stranger without the key can write
    bucket.put("runs/test/tags/forged.json", forged.to_bytes())
    bucket.put("runs/test/tags/copied.json", tag.to_bytes())
    for reader in (Run(f"{place}#test", public_key=pair[PUBLIC_KEY]), Run(f"{place}#test")):
        assert reader.manifest("best").version == 1
        with pytest.raises(SignatureError, match="no signature"):
            reader.manifest("forged")
        with pytest.raises(ProtocolError, match="copy of tag 'best'"):
            reader.manifest("copied")
        assert [tag.name for tag in reader.tags()] == ["best"]
    assert command("tag", f"{place}#test").output.count("not used") == 2
    with pytest.raises(SignatureError):
        Run(f"{place}#test", public_key=new_pair()[PUBLIC_KEY]).manifest("best")


def test_a_run_that_was_started_over_does_not_take_the_old_tags(url, tmp_path):
    Run(url).tag(1, "best")
    tag = (tmp_path / "bucket/runs/test/tags/best.json").read_bytes()
    shutil.rmtree(tmp_path / "bucket")
    write_run(url.partition("#")[0], tmp_path / "base", versions=2)
    open_bucket(url.partition("#")[0]).put("runs/test/tags/best.json", tag)
    with pytest.raises(ProtocolError, match="earlier run of this name"):
        Run(url).manifest("best")


def test_a_tagged_version_outlives_the_versions_around_it(tmp_path):
    run = Drifting(tmp_path / "bucket")
    run.steps(40)
    run.close()
    url = f"{(tmp_path / 'bucket').as_uri()}#{RUN}"
    Run(url).tag(11, "best")
    reader = run.reader
    for _ in range(2):  # the second survey meets the gap between the tagged version and the others
        survey = Pruner(reader, Keep.parse("1KB"), grace_s=0.0).survey()
        assert (survey.tagged, survey.oldest) == (("best",), survey.newest)
        prune(reader.bucket, survey)
    is_built(reader, 11, tmp_path / "built")
    newest = Run(url).manifest().version
    assert Run(url).manifest("best").version == 11
    assert [manifest.version for manifest in Run(url).versions()] == [newest]
    with pytest.raises(ProtocolError, match=f"no longer has version 20; the oldest available is {newest}"):
        Run(url).manifest(20)
    asked = command("bisect", url, "--good", "best", "--eval", "test {version} -lt 30")
    assert f"in the range 12 to {newest}: the versions between were deleted" in asked.complaint
    Run(url).untag("best")
    prune(reader.bucket, Pruner(reader, Keep.parse("1KB"), grace_s=0.0).survey())
    with pytest.raises(ProtocolError, match="no longer has version 11"):
        Run(url).manifest(11)


def test_a_damaged_tag_keeps_nothing_and_stops_nothing(url):
    bucket = open_bucket(url.partition("#")[0])
    bucket.put("runs/test/tags/broken.json", b"{")
    bucket.put("runs/test/tags/41.json", b"not the key of a tag")
    assert command("gc", url, "--keep", "1GB").code == 0
    assert "not used" in command("tag", url).output


def test_a_version_whose_files_are_gone_gets_no_tag(url, tmp_path):
    for part in (tmp_path / "bucket/runs/test/deltas").iterdir():
        part.unlink()
    with pytest.raises(ProtocolError, match="can no longer be built"):
        Run(url).tag(2, "best")
    assert Run(url).tags() == []
