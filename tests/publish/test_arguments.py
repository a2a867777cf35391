"""Misuse of `Publisher` and `follow` is refused at once, with one sentence that says the fix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_weight_sync import BucketWeightTransfer, ConfigError, FolderError, Publisher, follow
from delta_weight_sync.run import Run


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{(tmp_path / 'bucket').as_uri()}#run"


@pytest.fixture
def model(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


@pytest.mark.parametrize("kind", [Publisher, BucketWeightTransfer])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"base": torch.nn.Linear(1, 1)},
            "base is of type Linear, not a path: give the folder",
        ),
        ({"keep": 20}, "20 is neither a size nor an age: write it as 20GB, 7d or 12h"),
        ({"keep": ""}, "'' is neither a size nor an age"),
        ({"encoding": None}, "encoding is None, not one of 'fast', 'small'"),
        ({"mirror": "gpu"}, "mirror is 'gpu', not one of 'host', 'device'"),
        ({"on_version": "log"}, "on_version is 'log': give a function that takes a manifest"),
    ],
)
def test_an_argument_of_another_type_is_refused_before_a_bucket_is_made(kind, arguments, sentence, tmp_path):
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        kind(f"{(tmp_path / 'bucket').as_uri()}#run", **{"base": "x", **arguments})
    assert not (tmp_path / "bucket").exists()


@pytest.mark.parametrize("minutes", ["5", -1, float("nan"), None])
def test_minutes_that_are_no_number_are_refused(url, base, minutes):
    with pytest.raises(ConfigError, match=r"^state_minutes is .*: give a number of minutes, 0 for no pause"):
        Publisher(url, base, state_minutes=minutes)


@pytest.mark.parametrize("use", [Publisher, Run, lambda url: next(follow(url, "into"))])
def test_a_path_in_place_of_a_url_names_the_url(use, tmp_path):
    bucket = tmp_path / "bucket"
    with pytest.raises(ConfigError, match=rf"is of type PosixPath: write text, '{bucket.as_uri()}#<run>'$"):
        use(bucket)
    with pytest.raises(
        ConfigError, match=r"is of type NoneType: write text, 'hf://buckets/<owner>/<name>#<run>'"
    ):
        use(None)


FIX = r": publish the model itself, `publish\(model\)`, or `model.named_parameters\(\)`$"


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        (lambda model: model.parameters(), "`weights` gives a Parameter, not a pair of a name and a tensor"),
        (lambda model: torch.optim.SGD(model.parameters()), "`weights` is of type SGD"),
        (lambda model: next(model.parameters()), "`weights` is of type Parameter"),
        (lambda model: dict(model.named_modules()), " is of type Qwen3ForCausalLM, not a tensor"),
        (lambda model: {"x": 1.0}, "x is of type float, not a tensor"),
        (lambda model: [*model.state_dict()], "`weights` gives a str, not a pair of a name and a tensor"),
        (lambda model: None, "`weights` is of type NoneType"),
    ],
)
def test_what_is_no_model_and_no_named_tensors_is_refused(
    url, base, model, weights: Callable[[Any], Any], sentence: str
):
    with Publisher(url, base) as publisher:
        with pytest.raises(ConfigError, match=f"^{sentence}{FIX}"):
            publisher.publish(weights(model))
        publisher.publish(model)
        assert publisher.flush().version == 0


@pytest.mark.parametrize("step", [1.5, "3", -1, torch.tensor(1.5)])
def test_a_step_that_is_no_whole_number_is_refused(url, base, model, step):
    with Publisher(url, base) as publisher:
        for publish in (publisher.publish, publisher.publish_base):
            with pytest.raises(ConfigError, match=r"^step is .*: give a whole number, at least 0, or none"):
                publish(model, step)
        publisher.publish(model, torch.tensor(3))
        assert publisher.flush().sync == 3


def test_steps_may_not_fall(url, base, model):
    """`x-policy-min-sync` and the staleness of samples compare them."""
    with Publisher(url, base) as publisher:
        publisher.publish(model, 5)
        publisher.publish(model, 5)
        with pytest.raises(ConfigError, match=r"^step 3 comes after step 5, .*: give steps that never fall"):
            publisher.publish(model, 3)
        publisher.publish(model)
        assert publisher.sync == 6, "the refused step does not count"
    with Publisher(url, base) as publisher:
        publisher.publish(model, 1)  # another trainer, as its term says


def test_a_closed_publisher_says_so_at_once(url, base, model):
    """A notebook's usual mistake: the cell with the `with` block has ended."""
    optimizer = torch.optim.SGD(model.parameters())
    with Publisher(url, base) as publisher:
        publisher.publish(model)
    assert repr(publisher).endswith("version 0, sync 1, closed>")
    for use in (
        lambda: publisher.publish(model),
        lambda: publisher.publish_base(model),
        lambda: publisher.save_state(model, optimizer),
        lambda: publisher.restore(model, optimizer),
        publisher.find_state,
    ):
        with pytest.raises(ConfigError, match=r"^this Publisher is closed: publish inside"):
            use()
    publisher.close()
    assert publisher.sync == 1


def test_a_folder_to_follow_into_is_no_file(url, base, model, tmp_path):
    with Publisher(url, base) as publisher:
        publisher.publish(model)
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(FolderError, match=f"^{place} is a file, or lies in one: name a folder$"):
            next(follow(url, place, once=True))


def test_what_a_notebook_shows_is_short(url, base, model, tmp_path):
    with Publisher(url, base) as publisher:
        publisher.publish(model)
        manifest = publisher.flush()
    version = next(follow(url, tmp_path / "into", once=True))
    assert repr(version) == f"<FollowedVersion 0 in {version.path}, digest {manifest.digest}>"
    assert (
        repr(manifest) == f"<Manifest of run 'run': version 0, sync 1, all words, digest {manifest.digest}>"
    )


def test_what_needs_a_version_says_so_instead_of_waiting(url, base, model):
    optimizer = torch.optim.SGD(model.parameters())
    with Publisher(url, base) as publisher:
        for use in (publisher.flush, lambda: publisher.save_state(model, optimizer, final=True)):
            with pytest.raises(ConfigError, match=r"^nothing was published yet: call `publish` first$"):
                use()
        publisher.publish(model)
        for use in (publisher.save_state, publisher.restore):
            with pytest.raises(ConfigError, match=r"^`optimizer` is of type Qwen3ForCausalLM: pass"):
                use(model, model)


@pytest.mark.parametrize("seconds", ["1", 0, None])
def test_a_pause_that_is_no_number_of_seconds_is_refused(url, seconds):
    with pytest.raises(ConfigError, match=r"^poll_s is .*: give a number of seconds above 0$"):
        follow(url, "into", poll_s=seconds)
