"""The notebooks: every cell runs in order, with a tiny policy on the CPU, stand-ins for the platform, and the
simulated Hub. A real server with transformers follows the run in place of the Space's vLLM."""

import ast
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from delta_weight_sync import Run
from delta_weight_sync.reader import open_run
from delta_weight_sync.transformers_server import TransformersEngine, create_app
from delta_weight_sync.vllm.follower import Follower
from tests.support import tiny_policy
from tests.support.serving import serving
from tests.trainer.deploy.conftest import OWNER, READ, WRITE, World

NOTEBOOKS = Path(__file__).parents[3] / "docs" / "notebooks"
STEPS = 3
SERVE = "deploy(["  # begins the cells that need the Hub's Spaces


def cells(name: str) -> list[tuple[str, list[str]]]:
    """The code cells and their tags."""
    book = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "clear the outputs"
    return [("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in code]


def test_the_notebooks_differ_only_where_the_platforms_do():
    colab, kaggle = cells("colab"), cells("kaggle")
    assert [tags for _, tags in colab if tags] == [["install"], ["platform"]]
    assert [cell for cell in colab if "platform" not in cell[1]] == [
        cell for cell in kaggle if "platform" not in cell[1]
    ]
    for text, tags in colab + kaggle:
        assert "install" in tags or ast.parse(text)


class Axes:
    """Remembers what was plotted."""

    def __init__(self) -> None:
        self.curves = list[tuple[list[float], list[float]]]()
        self.words = dict[str, str]()

    def plot(self, x: list[float], y: list[float]) -> None:
        self.curves.append((x, y))

    def set(self, **words: str) -> None:
        self.words |= words


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> tuple[Axes, Axes]:
    """The two plots of the notebook; matplotlib, which both platforms have, is not installed here."""
    made = (Axes(), Axes())
    plt = SimpleNamespace(subplots=lambda *_, **__: (None, made), show=lambda: None)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(pyplot=plt))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", plt)
    return made


@pytest.fixture(autouse=True)
def platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"HF_TOKEN": WRITE, "SPACE_HF_TOKEN": READ}
    userdata = SimpleNamespace(get=tokens.__getitem__)
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(userdata=userdata))
    client = SimpleNamespace(get_secret=tokens.__getitem__)
    monkeypatch.setitem(sys.modules, "kaggle_secrets", SimpleNamespace(UserSecretsClient=lambda: client))


@contextmanager
def replica(world: World, url: str, folder: Path):
    """A server that follows the run, at the address of the Space with the replica."""
    engine = TransformersEngine()
    follower = Follower(open_run(url), engine, name="replica-1", folder=folder, poll_s=0.1)
    follower.start()
    try:
        with serving(create_app(follower, engine)) as address:
            world.hub.set_space(world.replica(), host=address)
            yield
    finally:
        follower.stop()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "serves_later"), [pytest.param("colab", False, marks=pytest.mark.long), ("kaggle", True)]
)
def test_every_cell_runs(
    world: World, axes: tuple[Axes, Axes], tmp_path: Path, capsys, name: str, serves_later: bool
):
    """In order, or with the Space made after the training."""
    tiny_policy.build(tmp_path / "policy")
    world.name_hosts()
    variables: dict[str, object] = {}
    changes = {
        '"notebook"': repr(world.name),
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(str(tmp_path / "policy")),
        "STEPS = 30": f"STEPS = {STEPS}",
    }
    code = [text for text, tags in cells(name) if "install" not in tags]
    for old, new in changes.items():
        assert sum(old in text for text in code) == 1, old
        code = [text.replace(old, new) for text in code]
    with mock.patch.dict(os.environ):
        serve = next(number for number, text in enumerate(code) if SERVE in text)
        if serves_later:
            asks = next(number for number, text in enumerate(code) if "Run(RUN).wait" in text)
            code.insert(asks - 1, code.pop(serve))
            serve = asks - 1
        for text in code[: serve + 1]:
            exec(text, variables)
        run = f"hf://buckets/{OWNER}/{world.name}#first"
        with replica(world, run, tmp_path / "folder"):
            for text in code[serve + 1 :]:
                exec(text, variables)
        newest = Run(run).manifest()
        assert newest.signature, "with the key that the notebook made"
    assert (newest.sync, newest.changed > 0) == (STEPS, True)
    said = capsys.readouterr().out
    assert f'"version":{newest.version}' in said.replace(" ", ""), "of the tokens of the answer"
    sent, rewards = axes
    ((versions, sizes),) = sent.curves
    assert versions == [*range(1, newest.version + 1)]
    assert all(0 < size < newest.full_bytes / 1e6 for size in sizes)
    ((steps, values),) = rewards.curves
    assert steps == [*range(1, STEPS + 1)]
    assert all(value < 0 for value in values)
    assert world.hub.space(world.replica())["stage"] == "PAUSED"
