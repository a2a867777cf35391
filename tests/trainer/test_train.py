"""`python -m trainer.train`: settings and run files, the end of training, learning rates, processes."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO
from unittest import mock

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen3Config
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync import gpu_build
from delta_weight_sync.errors import ConfigError
from delta_weight_sync.publish.states import usable_states
from delta_weight_sync.reader import open_run
from delta_weight_sync.runlog import DoneEvent, RunLogReader
from delta_weight_sync.store import open_bucket
from delta_weight_sync.trl import patches, sampling
from delta_weight_sync.trl.trainer import Progress
from tests.support import tiny_policy as tiny
from tests.support.trainer_lives import live
from trainer import memory
from trainer.resume import SaveState
from trainer.settings import Settings
from trainer.spaces import Spaces
from trainer.stop import LIMIT_S
from trainer.train import finish_early, job_command, main, train

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
BUCKET = "hf://buckets/team/read-only"


@pytest.mark.parametrize(("option", "least"), [("minutes", 0), ("norm_learning_rate", 0), ("state_every", 0)])
def test_a_setting_out_of_range_is_refused_with_the_values_allowed(option, least):
    """Also if it comes from a YAML file, whose values argparse does not check."""
    with pytest.raises(SystemExit, match=f"--{option} must be at least {least}; it is {least - 1}"):
        Settings(model="m", bucket="file:///b", run="r", replicas=[], **{option: least - 1})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--config nofile.yaml", r"--config: .*nofile\.yaml': name a YAML file"),
        (f"--config {__file__}", "--config: .*test_train.py.*: name a YAML file"),
        ("--minuts 3 --use_cpu true", "unknown option --minuts .*: correct it"),
        ("--config {}/wrong.yaml --use_cpu true", "unknown option --minuts .*: correct it"),
        ("--bf16 true", "this machine has no GPU: .* add --use_cpu true"),
    ],
    ids=["no file", "no YAML", "no such option", "no such key", "no GPU"],
)
def test_a_mistake_in_the_command_is_answered_with_one_sentence(words, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "wrong.yaml").write_text("minuts: 3\n")
    places = f"--model m --bucket {tmp_path.as_uri()} --run r --replicas http://r --output_dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["train", *places.split(), *words.format(tmp_path).split()])
    with pytest.raises(SystemExit, match=rf"^trainer: {sentence}.*$") as ended:
        main()
    assert "\n" not in str(ended.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    tiny.build(folder / "base", tie=True, seed=0)
    return folder / "base"


TOKENS = [("hf_read", 403), ("hf_bucket_read", 403), ("hf_expired", 401), ("hf_typo", 401), ("", 401)]


@pytest.mark.parametrize(("token", "status"), TOKENS)
def test_a_token_that_may_not_write_ends_the_trainer(hub_env, base, tmp_path, monkeypatch, token, status):
    open_bucket(BUCKET, create=True)
    writes = os.environ["HF_TOKEN"]
    monkeypatch.setenv("HF_TOKEN", token)
    options = f"--model {base} --bucket {BUCKET} --run first --task brevity --replicas http://127.0.0.1:9"
    options += f" --output_dir {tmp_path} --use_cpu true --bf16 false --dtype float32 --report_to none"
    monkeypatch.setattr("sys.argv", ["trainer.train", *options.split(), "--token_budget", "512"])
    with pytest.raises(SystemExit) as ended:
        main()
    message = str(ended.value)
    assert message.startswith(f"trainer: the Hub refused write access to {BUCKET}")
    assert f" ({status}, " in message
    assert message.endswith("set HF_TOKEN to a token with write access to team/read-only")
    assert not token or token not in message
    monkeypatch.setattr("trainer.train.train", mock.Mock(side_effect=TimeoutError("too slow")))
    with pytest.raises(SystemExit, match=r"^trainer: too slow$"):
        main()
    monkeypatch.setenv("HF_TOKEN", writes)
    assert open_bucket(BUCKET).list("") == [], "nothing was written"


@pytest.fixture(scope="module")
def buckets(base: Path) -> tuple[str, str]:
    """A run whose time was over and that was resumed, and one with a rate for the norms, resumed as well."""
    for name in ("timed", "rated"):
        (base.parent / name).mkdir()
    timed, rated = ((base.parent / name).as_uri() for name in ("timed", "rated"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "_replace", patch.setattr)  # TRL is as it was, after these lives
        live(base.parent, timed, 4, every=2, minutes=1e-6)
        live(base.parent, timed, 3, every=2)
        live(base.parent, timed, 3, every=2)  # it has nothing left to do
        live(base.parent, rated, 1, norm_learning_rate=0.05)
        live(base.parent, rated, 2, norm_learning_rate=0.05)
    return timed, rated


def ends(url: str) -> list[DoneEvent]:
    events = RunLogReader(open_bucket(url), "lives").poll()
    return [event for event in events if isinstance(event, DoneEvent)]


@pytest.mark.live
def test_training_ends_with_its_time_and_resumes_without_that_limit(buckets):
    """The limit is over before the first step. A last step without a sync is published and saved as well."""
    early, late = ends(buckets[0])
    assert (early.version, early.stopped_by) == (1, "time")
    assert (late.version, late.stopped_by) == (3, "steps"), "step 1 is not made again"
    run = open_run(buckets[0])
    assert [run.manifest(done.version).digest for done in (early, late)] == [early.digest, late.digest]
    assert [record.version for record, _ in usable_states(run)] == [3, 1]


@pytest.mark.live
def test_fresh_starts_a_run_again_from_the_model(buckets, base, tmp_path, monkeypatch):
    bucket = shutil.copytree(base.parent / "timed", tmp_path / "timed")
    monkeypatch.setattr(patches, "_replace", monkeypatch.setattr)
    live(base.parent, bucket.as_uri(), 1, fresh=True)
    run = open_run(bucket.as_uri())
    again = run.manifest(4)
    assert (again.sync, again.digest) == (1, run.manifest(0).digest)
    assert run.manifest().sync == 2


@pytest.mark.live
@pytest.mark.parametrize("fresh", [True, False])
def test_another_model_than_the_runs_is_refused_at_once(buckets, base, tmp_path, monkeypatch, fresh):
    shutil.copytree(base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    monkeypatch.setattr(patches, "_replace", monkeypatch.setattr)
    monkeypatch.setattr(Spaces, "wait", mock.Mock(side_effect=AssertionError("waited")))
    sentence = "parameter lm_head.weight is not part of the run; start a new run for a new model"
    with pytest.raises(SystemExit, match=f"^trainer: {sentence}$"):
        live(tmp_path, buckets[0], 9, fresh=fresh)


@pytest.mark.parametrize(
    ("steps", "cut", "done"),
    [
        (0, False, ["save"]),
        (3, False, ["save", "sync", "save"]),
        (4, False, ["save", "save"]),
        (3, True, ["save"]),
    ],
    ids=["none", "no sync after the last", "a sync after the last", "cut within a step"],
)
@pytest.mark.parametrize("interrupted", [False, True])
def test_the_state_at_the_end_is_that_of_the_last_step(steps, cut, done, interrupted):
    trainer = mock.MagicMock()
    args = SimpleNamespace(weight_sync_steps=2, gradient_accumulation_steps=1)
    trainer.resumed_from = None
    trainer.progress.return_value = Progress(1, {}, 0, ())
    trainer.callback_handler.model = torch.nn.Linear(1, 1)
    states = SaveState(trainer, trainer, every=20)
    states.on_train_begin(args, None, None)
    for step in range(1, steps + 1):
        states.on_step_begin(args, None, None)
        if not (cut and step == steps):
            states.on_step_end(args, SimpleNamespace(global_step=step), None)
    if not interrupted:
        states.on_train_end(args, None, None)
    states.finish()
    words = {"sync": "sync", "save_state": "save"}
    assert [words[call[0]] for call in trainer.mock_calls if call[0] in words] == done


@pytest.mark.parametrize("resumed", [None, 1])
@pytest.mark.parametrize("failure", [None, OSError("disk full")])
@pytest.mark.parametrize("begun", [True, False])
def test_a_stopped_trainer_says_that_its_state_is_saved_if_it_is(begun, failure, resumed, capsys):
    trainer = mock.MagicMock(state_failure=failure, is_main=True, resumed_from=resumed)
    trainer.progress.return_value = Progress(1, {}, 0, ())
    trainer.callback_handler.model = torch.nn.Linear(1, 1)
    states = SaveState(trainer, trainer, every=20)
    if begun:
        states.on_train_begin(None, None, None)
    finish_early(trainer, states, SimpleNamespace(left_s=1.0, signal=signal.SIGTERM))
    assert ("the state is saved" in capsys.readouterr().out) == (begun and failure is None)


@pytest.mark.live
def test_the_norms_may_learn_faster_than_the_matrices(buckets, tmp_path):
    """AdamW's first step moves every weight that has a gradient by about its learning rate."""
    run = open_run(buckets[1])
    for version in (0, 1):
        run.checkout(run.manifest(version), tmp_path / str(version))
    before, after = (load_file(tmp_path / str(version) / "model.safetensors") for version in (0, 1))
    moved = {name: (after[name].float() - before[name].float()).abs().max().item() for name in before}
    assert all(by > 0.04 for name, by in moved.items() if before[name].ndim == 1)
    assert all(by < 0.01 for name, by in moved.items() if before[name].ndim == 2)
    assert [done.version for done in ends(buckets[1])] == [1, 2], "also after it was resumed"


@pytest.mark.long
def test_two_processes_resume_what_one_has_trained_and_one_what_two_have(buckets, base, tmp_path):
    shutil.copytree(base.parent / "rated", tmp_path / "bucket")
    url = (tmp_path / "bucket").as_uri()
    work = "import sys; from pathlib import Path\n"
    work += "from tests.support.trainer_lives import live\n"
    work += "live(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), norm_learning_rate=0.05)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for steps, size in ((3, 2), (4, 1)):
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in range(size):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
                env = ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1"} | {key: str(n) for key, n in place.items()}
                command = [sys.executable, "-c", work, str(base.parent), url, str(steps)]
                ranks.append(stack.enter_context(subprocess.Popen(command, env=env)))
                stack.callback(ranks[-1].kill)
            assert [rank.wait(120.0) for rank in ranks] == [0] * size
        assert [done.version for done in ends(url)][2:] == list(range(3, steps + 1))
        assert len(next(usable_states(open_run(url)))[0].ranks) == size


@contextlib.contextmanager
def waiting_trainers(folder: Path, lives: int) -> Iterator[IO[str]]:
    """Trainers that wait for samples, one after the other; yields their output and that of their parent."""
    code = "import sys; from pathlib import Path; from tests.support.trainer_lives import wait_in_vain\n"
    code += "wait_in_vain(Path(sys.argv[1]), int(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(folder), str(lives)]
    with (folder / "errors").open("w") as errors:
        parent = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert parent.stdout is not None
    try:
        yield parent.stdout
    finally:
        for process in (*psutil.Process(parent.pid).children(recursive=True), parent):
            process.kill()
        parent.communicate(timeout=300.0)


def until(start: str, output: IO[str], errors: Path) -> list[str]:
    """The last two lines up to one that starts like this."""
    before = ""
    for line in output:
        if line.startswith(start):
            return [before, line]
        before = line
    raise AssertionError(errors.read_text()[-3000:])


def next_trainer(output: IO[str], errors: Path) -> tuple[psutil.Process, list[psutil.Process]]:
    """The next trainer, which waits, and all processes that it has started."""
    trainer = psutil.Process(int(until("trainer ", output, errors)[-1].split()[1]))
    until("waiting", output, errors)
    children = trainer.children(recursive=True)
    assert any("spawn_main" in " ".join(child.cmdline()) for child in children)
    return trainer, children


@pytest.mark.long
def test_a_signal_and_a_sudden_death_end_the_process_that_plays(tmp_path):
    errors = tmp_path / "errors"
    with waiting_trainers(tmp_path, 2) as output:
        trainer, children = next_trainer(output, errors)
        trainer.send_signal(signal.SIGTERM)
        assert psutil.wait_procs([trainer], timeout=2 * LIMIT_S)[1] == []
        said, ended = until("ended ", output, errors)
        assert "version 0 is published and the state is saved; the same command" in said, errors.read_text()
        assert ended == f"ended {128 + signal.SIGTERM}\n"
        assert psutil.wait_procs(children, timeout=10)[1] == []
        trainer, children = next_trainer(output, errors)
        trainer.kill()
        assert psutil.wait_procs(children, timeout=10)[1] == []
    version = open_run((tmp_path / "bucket").as_uri()).manifest().version
    assert version == 0, "version 0 is not published twice"


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(1, 1), (20, 2)],
)
@pytest.mark.long
def test_the_versions_are_those_of_a_trainer_that_was_left_alone(kills, seed, tmp_path):
    """Ended by -9 and SIGTERM at random instants, and started again with the same command."""
    lives = [sys.executable, "-m", "tests.support.trainer_lives", str(tmp_path), str(kills), str(seed)]
    limit = 200 + 60 * kills
    done = subprocess.run(lives, env=ENVIRONMENT, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "versions.json").read_text())
    assert [version for version, _, _ in result["undisturbed"]] == list(range(result["steps"] + 1))
    assert result["ended"] == result["undisturbed"], result["ends"]
    for number, end in enumerate(result["ends"]):
        code = int(end.rpartition(" ")[2])
        log = (tmp_path / f"{number}.log").read_text()
        # One that is ended after a while may be done before that, and so are those after it.
        assert code in ((-9, 143)[number % 2], *([0] if kills > 4 else [])), f"{end}\n{log[-3000:]}"
        if code == 143:
            assert "the same command resumes the run" in log


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "trainer" / "configs"
WHERE = "--bucket hf://buckets/me/wordle --run first --replicas https://r --env_url https://e"


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_1_7b", "qwen3_0_6b_reverse_text"])
def test_only_the_addresses_are_missing(name, tmp_path):
    # bf16 autocast is checked against the hardware when it is parsed
    options = ["--config", str(CONFIGS / f"{name}.yaml"), "--bf16", "false", "--output_dir", str(tmp_path)]
    parser = TrlParser((Settings, AsyncGRPOConfig))
    script, config = parser.parse_args_and_config([*options, *WHERE.split()])
    assert "/Qwen3-" in script.model
    assert script.replicas == ["https://r"]
    assert config.per_device_train_batch_size % config.num_generations == 0, "a step has whole groups"
    assert config.dtype == "float32", "small steps are not rounded away"
    assert script.task == ("reverse_text" if "reverse_text" in name else "wordle")
    if script.task == "wordle":
        assert config.chat_template_kwargs == {"enable_thinking": False}
        assert config.max_tool_calling_iterations == 6, "all guesses"
        assert config.max_completion_length == 1024
        turns = config.max_tool_calling_iterations + 1
        assert config.token_budget > turns * config.max_completion_length + 500, "the longest game fits"


def test_the_imitated_policy_plays_32_words_16_times_in_each_step(tmp_path):
    """The scale of prime-rl's example, which its header names."""
    name = str(CONFIGS / "wordle_imitated.yaml")
    options = ["--config", name, "--bf16", "false", "--output_dir", str(tmp_path), "--model", "imitated"]
    script, config = TrlParser((Settings, AsyncGRPOConfig)).parse_args_and_config([*options, *WHERE.split()])
    games = config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert (games, config.num_generations) == (32 * 16, 16)
    assert config.per_device_train_batch_size % config.num_generations == 0, "no group is divided"
    assert script.prompt == "Play Wordle.", "as in the imitation"
    sampling.require_exact(vars(config))


def test_the_command_for_a_job_keeps_all_but_the_places(monkeypatch, capsys, tmp_path):
    """Also with a configuration in the bucket, which Jobs can read."""
    bucket = open_bucket(tmp_path.as_uri())
    bucket.put("tiny.yaml", (CONFIGS / "wordle_tiny.yaml").read_bytes())
    kept = ["--config", f"{tmp_path.as_uri()}/tiny.yaml", "--model", "a b", "--use_cpu", "true"]
    places = WHERE.replace("https://r", "https://r https://s").split()
    monkeypatch.setattr(sys, "argv", ["train", *kept, *places, "--job", "l4x1", "--minutes=5"])
    main()
    command = shlex.split(capsys.readouterr().out)
    up = "python -m trainer.deploy up --on jobs --owner me --name wordle --run first --trainer-hardware l4x1"
    assert command[:-1] == up.split()
    assert shlex.split(command[-1].removeprefix("--train=")) == [*kept, "--minutes=5"]
    assert not list(tmp_path.glob("runs"))


def test_a_bucket_that_jobs_cannot_use_has_no_command(monkeypatch, tmp_path):
    words = [
        "--config",
        str(CONFIGS / "wordle_tiny.yaml"),
        "--model",
        "m",
        "--use_cpu",
        "true",
        "--job",
        "l4x1",
    ]
    place = WHERE.replace("hf://buckets/me/wordle", tmp_path.as_uri())
    monkeypatch.setattr(sys, "argv", ["train", *words, *place.split()])
    with pytest.raises(SystemExit, match="--job: Jobs cannot use --bucket file:"):
        main()


@pytest.mark.parametrize("config", ["/elsewhere/tiny.yaml", "tiny.yaml"])
def test_a_configuration_that_a_job_does_not_have_is_refused(config):
    settings, _ = TrlParser((Settings, AsyncGRPOConfig)).parse_args_and_config(
        [*WHERE.split(), "--model", "m", "--output_dir", "o", "--bf16", "false", "--job", "l4x1"]
    )
    with pytest.raises(ConfigError, match=f"a Job has no --config {config}: name one of the checkout"):
        job_command(settings, ["--config", config])


@pytest.mark.parametrize(("name", "width"), [("qwen3_0_6b", 1024), ("qwen3_1_7b", 2048)])
def test_the_documentation_has_the_memory_of_each_configuration(name, width, tmp_path):
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "tie_word_embeddings": True}
    Qwen3Config(vocab_size=151936, **heads, **sizes).save_pretrained(tmp_path)
    options = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    needs = memory.parts(str(tmp_path), options) | {"total": 0}
    needs["total"] = sum(needs.values())
    row = " | ".join(f"{need / 1e9:.1f}" for need in needs.values())
    assert f"| `{name}` | {row} |\n" in (ROOT / "docs" / "limits-and-costs.md").read_text()
    four = memory.parts(str(tmp_path), options, 4)
    assert 4 * four["weights"] == needs["weights"]
    assert 4 * four["mirror"] == 1.75 * needs["mirror"] > 0, "its tensors, and blocks of three in four others"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("driver", "is old"), ("GPUs", "CUDA_VISIBLE_DEVICES=0"), ("memory", "0 GB here: use a")],
)
def test_what_this_machine_cannot_train_is_refused_before_the_run_is_opened(fault, sentence, base, tmp_path):
    options = {"model": str(base), "bucket": tmp_path.as_uri(), "run": "r", "replicas": []}
    config = AsyncGRPOConfig(str(tmp_path / "out"), bf16=False, report_to="none", token_budget=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_build, "problem", lambda: "the driver is old" if fault == "driver" else "")
        patch.setattr(AsyncGRPOConfig, "n_gpu", 2 if fault == "GPUs" else 1)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
        with pytest.raises(SystemExit, match=sentence):
            train(Settings(**options), config)
    assert not list(tmp_path.glob("runs"))
