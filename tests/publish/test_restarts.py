"""A trainer is started again without a state: it continues, goes back with a word, or is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from delta_weight_sync import BucketUnreachableError, ConfigError, Publisher, Run, StateError, follow
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.reader import open_run
from delta_weight_sync.signing import new_pair
from delta_weight_sync.store import open_bucket
from delta_weight_sync.store._files import FileBucket

SHAPES = {"embed.weight": (30, 4), "norm.weight": (4,)}
REFUSED = (
    r"#main has versions up to 3, but this trainer starts with the weights of version 0.* set fresh=True"
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    save_file(
        {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{(tmp_path / 'bucket').as_uri()}#main"


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """A trainer's float32 weights, loaded from a checkpoint."""
    return {name: torch.from_numpy(bits).view(torch.bfloat16).float() for name, bits in read_bits(folder)}


def train(url: str, base: Path, versions: int = 3, rate: float = 1.0) -> dict[str, torch.Tensor]:
    """Publish `base`, and then a number of versions in which weights have grown."""
    weights = loaded(base)
    with Publisher(url, base) as publisher:
        publisher.publish(weights)
        publisher.flush()
        for _ in range(versions):
            weights["norm.weight"] += rate
            publisher.publish(weights)
            publisher.flush()
    return weights


def listed(url: str) -> list[str]:
    """The objects of a run's versions."""
    objects = open_bucket(url.partition("#")[0]).list("runs/main/")
    return sorted(info.key for info in objects if "/heads/" not in info.key and "/log/" not in info.key)


def versions(url: str) -> list[tuple[int, int]]:
    """Version and sync of all, oldest first."""
    return [(manifest.version, manifest.sync) for manifest in open_run(url).versions()][::-1]


@pytest.mark.parametrize("signed", [False, True])
def test_the_base_is_refused_in_a_run_that_is_ahead(url, base, signed, monkeypatch):
    """Before a byte of it is stored; the run's versions then can be continued. Going back must be meant."""
    for name, key in new_pair().items() if signed else ():
        monkeypatch.setenv(name, key)
    train(url, base)
    before = listed(url)
    with pytest.raises(ConfigError, match=REFUSED), Publisher(url, base) as publisher:
        publisher.publish(loaded(base))
    assert listed(url) == before
    with Publisher(url, base, fresh=True) as publisher:
        publisher.publish(loaded(base))
    again = open_run(url).manifest()
    assert (again.version, again.sync) == (4, 5)
    assert again.digest == open_run(url).manifest(0).digest


def test_the_newest_version_as_the_model_continues_the_run(url, base, tmp_path):
    """`checkout` is the model and the base of the script; syncs count on."""
    train(url, base)
    Run(url).checkout(tmp_path / "newest")
    weights = train(url, tmp_path / "newest", 1)
    assert versions(url) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    (followed,) = follow(url, tmp_path / "followed", once=True)
    assert torch.equal(loaded(followed.path)["norm.weight"], weights["norm.weight"].bfloat16().float())
    assert open_run(url).manifest(4).changed == 0


def test_a_checkpoint_behind_the_run_takes_it_back_with_a_sentence(url, base, tmp_path, caplog):
    train(url, base)
    Run(url).checkout(tmp_path / "older", 2)
    caplog.clear()
    train(url, tmp_path / "older", 0)
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(
        "run 'main' goes back from version 3 (sync 4) to the weights of version 2 (sync 3)"
    )
    newest = open_run(url).manifest()
    assert (newest.version, newest.sync, newest.digest) == (4, 5, open_run(url).manifest(2).digest)


def test_weights_of_no_version_are_published_with_a_warning(url, base, caplog):
    weights = train(url, base)
    caplog.clear()
    with Publisher(url, base) as publisher:
        publisher.publish({name: weight + 7 for name, weight in weights.items()})
    assert ["versions up to 3, but this trainer resumed no state" in r.message for r in caplog.records] == [
        True
    ]


def test_weights_of_version_0_are_news_to_nobody_if_the_newest_version_has_them(url, base):
    """As after a warmup, with a learning rate of 0 until now."""
    train(url, base, rate=0.0)
    train(url, base)
    assert versions(url)[-1] == (7, 8)


def test_only_the_first_weights_of_a_trainer_may_be_a_mistake(url, base):
    """One that continued the run may return to version 0, and so may one that began it."""
    weights = train(url, base)
    with Publisher(url, base) as publisher:
        publisher.publish(weights)
        publisher.publish(loaded(base))
    assert open_run(url).manifest().digest == open_run(url).manifest(0).digest


def test_a_state_of_version_0_resumes(url, base):
    """The trainer then repeats what it published after the state."""
    weights = loaded(base)
    optimizer = torch.optim.SGD([weight.requires_grad_() for weight in weights.values()])
    with Publisher(url, base) as publisher:
        publisher.publish(weights)
        publisher.save_state(weights, optimizer)
        with torch.no_grad():
            weights["norm.weight"] += 1
        publisher.publish(weights)
    with Publisher(url, base) as publisher:
        publisher.restore(weights, optimizer)
        publisher.publish(weights, 1)
        with torch.no_grad():
            weights["norm.weight"] += 1
        publisher.publish(weights)
    assert versions(url) == [(0, 1), (1, 2)]


def test_the_base_is_refused_after_a_failed_restore_too(url, base):
    """Even if syncs after the state could be held back as repetitions."""
    weights = loaded(base)
    with Publisher(url, base, state_minutes=0) as publisher:
        publisher.publish(weights)
        for _ in range(3):
            weights["norm.weight"] += 1
            publisher.publish(weights)
            publisher.flush()
            if publisher.sync == 2:
                publisher.save_state(weights, torch.optim.AdamW(weights.values()))
    before = listed(url)
    weights = loaded(base)
    publisher = Publisher(url, base)
    with pytest.raises(StateError, match="AdamW when the state was saved and is SGD"):
        publisher.restore(weights, torch.optim.SGD(weights.values()))
    with pytest.raises(ConfigError, match=REFUSED):
        publisher.publish(loaded(base))
    publisher.close()
    assert listed(url) == before


def test_the_base_is_refused_after_a_failed_read_too(url, base, monkeypatch):
    """The names come from the run's files, which are read when the first weights come."""
    train(url, base)
    before = listed(url)
    publisher = Publisher(url)
    read = FileBucket._read

    def fail(self: FileBucket, key: str, limit: int) -> bytes:
        if "/anchors/" in key:
            raise OSError(5, "one failed read")
        return read(self, key, limit)

    with monkeypatch.context() as patched:
        patched.setattr(FileBucket, "_read", fail)
        with pytest.raises(BucketUnreachableError):
            publisher.publish(loaded(base))
    with pytest.raises(ConfigError, match=REFUSED):
        publisher.publish(loaded(base))
    publisher.close()
    assert listed(url) == before


@pytest.mark.parametrize("lost", ["deleted", "damaged"])
def test_without_the_manifest_of_version_0_the_base_tells_its_weights(url, base, tmp_path, lost):
    """`keep` deletes it. A base that is a later checkout tells nothing."""
    train(url, base)
    Run(url).checkout(tmp_path / "older", 2)
    (key,) = [key for key in listed(url) if "/manifests/00000000" in key]
    bucket = open_bucket(url.partition("#")[0])
    bucket.delete([key]) if lost == "deleted" else bucket.put(key, b"{}")
    with pytest.raises(ConfigError, match=REFUSED), Publisher(url, base) as publisher:
        publisher.publish(loaded(base))
    train(url, tmp_path / "older", 0)
    assert open_run(url).manifest().digest == open_run(url).manifest(2).digest


def test_the_base_is_refused_as_the_repair_of_a_damaged_run_too(url, base):
    train(url, base)
    bucket = open_bucket(url.partition("#")[0])
    bucket.delete([key for key in listed(url) if "/deltas/" in key])
    with pytest.raises(ConfigError, match=REFUSED), Publisher(url, base) as publisher:
        publisher.publish(loaded(base))
    assert not [key for key in listed(url) if "00000004" in key]


@pytest.mark.parametrize("first", ["publish", "publish_base"])
def test_a_damaged_run_is_not_repaired_without_a_base(url, base, first):
    """Only the base tells which tensors a version has besides the trainer's, and in which dtypes."""
    weights = train(url, base)
    bucket = open_bucket(url.partition("#")[0])
    bucket.delete([key for key in listed(url) if "/deltas/" in key])
    before = listed(url)
    partial = {"norm.weight": weights["norm.weight"] + 7}
    with (
        pytest.raises(ConfigError, match=r"'main' cannot be rebuilt.*: give the base that"),
        Publisher(url) as publisher,
    ):
        getattr(publisher, first)(partial)
    assert listed(url) == before
    with Publisher(url, base) as publisher:
        publisher.publish(weights | partial)
    (repaired,) = follow(url, base.parent / "followed", once=True)
    assert torch.equal(loaded(repaired.path)["norm.weight"], partial["norm.weight"].bfloat16().float())


def test_a_version_that_cannot_be_read_stops_no_trainer(url, base, caplog):
    """It is read only to log with which version the trainer starts."""
    weights = train(url, base)
    (key,) = [key for key in listed(url) if "/manifests/00000002" in key]
    open_bucket(url.partition("#")[0]).put(key, b"{}")
    caplog.clear()
    with Publisher(url, base) as publisher:
        publisher.publish({name: weight + 7 for name, weight in weights.items()})
    assert open_run(url).manifest().version == 4
    assert ["versions up to 3, but this trainer" in record.message for record in caplog.records] == [True]
