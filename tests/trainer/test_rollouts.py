"""How samples are made and tagged: the rollout loop against a replica on loopback that names its versions."""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import queue
import signal
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import aiohttp
import pytest
from starlette.exceptions import HTTPException
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig

import trainer.policies
from delta_weight_sync import ConfigError, RolloutError
from delta_weight_sync.trl.trainer import Progress, TrainedGroups
from inference_space.completions import Completions
from tests.support.http_server import Request, answering
from tests.support.waiting import PATIENCE_S, soon
from trainer import rollouts
from trainer.policies.tokens import WordleTokens
from trainer.rollouts import ReplicaRolloutLoop, ReplicaRolloutWorker
from trainer.samples import UNKNOWN
from trainer.spaces import Fleet
from trainer.tasks import Task
from trainer.tasks.wordle import make_dataset

TERM = 2
TOKENIZER = Path(trainer.policies.__file__).parent / "wordle-tiny"


class Game:
    """A game of one guess: a conversation with it has two turns."""

    def reset(self, **row):
        pass

    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: A five-letter word.
        """
        return "game over"

    def get_reward(self) -> float:
        return 1.0


def samples_of(
    conversations: list[list[dict[str, str]]], inherited: int = 4, game: type[Game] = Game
) -> list:
    """One group of samples, each conversation with the headers of its turns: a guess, then an end."""
    tokens = WordleTokens(AutoTokenizer.from_pretrained(TOKENIZER))
    turns = itertools.cycle([tokens.call("crane"), [tokens.end_of_turn]])
    headers = itertools.cycle(itertools.chain(*conversations))
    samples = queue.Queue()
    asked = list[bytes]()

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        asked.append(request.body)
        turn = next(turns)
        choice = {"token_ids": turn, "logprobs": {"token_logprobs": [-1.0] * len(turn)}}
        body = json.dumps({"choices": [choice]}).encode()
        return 200, {"content-type": "application/json", **next(headers)}, body

    with answering(answer) as url:
        loop = rollout_loop(url, len(conversations), samples, game)
        loop._syncs.inherited = inherited
        asyncio.run(play(loop, lambda: samples.qsize() >= len(conversations)))
    completions = Completions(lambda: None, batch=1)
    assert all(completions.count(body) == 1 for body in asked), "a replica's public port lets them pass"
    return [samples.get_nowait() for _ in conversations]


async def play(loop: ReplicaRolloutLoop, done: Callable[[], bool]) -> None:
    """Play until it is done, or the loop fails."""
    rolling = asyncio.create_task(loop.run())
    while not (done() or rolling.done()):
        await asyncio.sleep(0.02)
    rolling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await rolling


def rollout_loop(
    replicas: str, generations: int, samples: queue.Queue, game: type[Game] = Game, at_a_time: int = 1
) -> ReplicaRolloutLoop:
    """What the worker starts in its process."""
    sizes = {"num_generations": generations, "max_inflight_tasks": at_a_time, "max_staleness": 60}
    config = AsyncGRPOConfig(bf16=False, use_cpu=True, **sizes)
    task = Task(make_dataset("Play Wordle.", 1, seed=0), [], game)
    progress = Progress(syncs=0, trainer={}, prompts=3, later=(4, 6))
    worker = rollouts.make_worker(str(TOKENIZER), config, task, Fleet([replicas]), TERM, progress)
    worker.update_model_version(100)
    worker.inherit(4)
    shared = {"samples": samples, "metrics": queue.Queue(), "syncs": worker._syncs}
    return ReplicaRolloutLoop(**worker._options, **shared, heartbeat=worker._heartbeat)


def named(sync: int, term: int = TERM) -> dict[str, str]:
    """The header of an answer whose tokens are not known each."""
    return made_by({"weights": weights(sync, term)})


def made_by(*entries: dict[str, object]) -> dict[str, str]:
    return {"x-policy-versions": json.dumps(entries)}


def weights(sync: int, term: int) -> dict[str, int]:
    return {"version": sync + 1, "term": term, "sync": sync}


@pytest.mark.parametrize(
    ("turn", "sync"),
    [(named(9, TERM - 1), 4), (named(3, TERM - 1), 3), ({}, 0)],
    ids=["of an earlier trainer after this one took over from it", "before that", "unnamed"],
)
def test_weights_of_an_earlier_trainer_are_as_old_as_what_this_one_has_of_them(turn, sync):
    assert [s.model_version for s in samples_of([[named(5), turn], [named(5), named(5)]])] == [sync, 5]


def spanned(*spans: tuple[int, int, int], term: int = TERM) -> dict[str, str]:
    """The header of an answer: sync, first token, token after the last."""
    return made_by(*({"weights": weights(s, term), "tokens": [[0, a, b]]} for s, a, b in spans))


@pytest.mark.parametrize(
    ("guess", "syncs"),
    [
        (spanned((5, 0, 2), (6, 2, 7)), [5] * 2 + [6] * 5),
        (spanned((5, 0, 5)), [5] * 5 + [UNKNOWN] * 2),
        (spanned((3, 0, 1), (4, 1, 6), (9, 6, 7), term=TERM - 1), [3] + [4] * 5 + [UNKNOWN]),
        (named(5), [UNKNOWN] * 7),
    ],
    ids=["a commit within the answer", "a part is unnamed", "an earlier trainer's", "too long for a header"],
)
def test_each_token_of_a_sample_has_the_weights_that_made_it(guess, syncs):
    """Also on the other side of the queue of processes."""
    (sample,) = samples_of([[guess, spanned((7, 0, 1))]])
    (sample,) = pickle.loads(pickle.dumps([sample]))
    made = sample.completion_mask == 1
    assert sample.token_syncs[made].tolist() == [*syncs, 7]
    assert (sample.token_syncs[~made] == UNKNOWN).all()
    assert len(sample.token_syncs) == len(sample.input_ids)


def test_each_conversation_of_a_group_keeps_its_own_and_its_oldest():
    """The later turn may be the older one, answered by a replica that lags behind."""
    turns = ((5, 3), (6, 7), (9, 9))
    samples = samples_of([[spanned((a, 0, 7)), spanned((b, 0, 1))] for a, b in turns])
    assert [sample.model_version for sample in samples] == [3, 6, 9]
    assert len({sample.group_id for sample in samples}) == 1
    syncs = [sample.token_syncs[sample.completion_mask == 1].tolist() for sample in samples]
    assert syncs == [[a] * 7 + [b] for a, b in turns]


@pytest.mark.parametrize("turn", [named(9, TERM - 1), named(102)], ids=["earlier trainer", "another run"])
def test_an_answer_of_weights_that_a_fresh_trainer_never_had_is_asked_for_again(turn, monkeypatch):
    monkeypatch.setattr(rollouts, "_REST_S", 0.0)
    (sample,) = samples_of([[turn, spanned((101, 0, 1))]], inherited=0)
    assert sample.token_syncs[sample.completion_mask == 1].tolist() == [101]


class Judged(Game):
    def reset(self, **row):
        return " Begin."

    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: A five-letter word.
        """
        raise ValueError(f"{word} is no word")

    rewards: ClassVar = iter([3.0, None, 1.0])

    def get_reward(self) -> float:
        return next(self.rewards)


def test_a_group_is_scored_without_the_games_that_have_no_reward():
    """The policy reads what a game shows first, and why a tool fails."""
    samples = samples_of([[named(5), named(5)]] * 3, game=Judged)
    assert [sample.advantage for sample in samples] == pytest.approx([1.0, 0.0, -1.0])
    assert [str(sample.metrics["reward"]) for sample in samples] == ["3.0", "nan", "1.0"]
    for sample in samples:
        assert sample.prompt[-1]["content"] == "Play Wordle. Begin."
        assert sample.completion[1]["content"] == "{'error': 'crane is no word'}"
        assert sample.metrics["tools/failure_frequency"] == 1.0


def play_guesses(
    turns: int, refusal: str, status: int, game: type[Game] = Game, calls: int = 1
) -> tuple[Any, list[dict]]:
    """The first sample and all metrics of a policy that only guesses. Its replica refuses later requests."""
    ids = WordleTokens(AutoTokenizer.from_pretrained(TOKENIZER)).call("crane") * calls
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}
    asked = itertools.count()

    def answer(_: Request) -> tuple[int, dict[str, str], bytes]:
        if next(asked) < turns:
            return 200, {"content-type": "application/json"}, json.dumps({"choices": [choice]}).encode()
        return status, {}, json.dumps({"error": {"message": refusal}}).encode()

    samples: queue.Queue[Any] = queue.Queue()
    with answering(answer) as url:
        loop = rollout_loop(url, 1, samples, game)
        with pytest.raises(RolloutError, match="refused a rollout's request"):  # of the next conversation
            asyncio.run(play(loop, lambda: False))
    (sample,) = [samples.get_nowait() for _ in range(samples.qsize())]
    return sample, [loop._metrics.get_nowait() for _ in range(loop._metrics.qsize())]


class Ending(Game):
    def reset(self, **row):
        self.guesses = 0

    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: A five-letter word.
        """
        self.guesses += 1
        return "go on"

    @property
    def done(self) -> bool:
        return self.guesses == 2


def test_a_conversation_ends_with_its_environment():
    sample, _ = play_guesses(2, "no more", 400, Ending)
    assert [said["role"] for said in sample.completion] == ["assistant", "tool"] * 2


class Tools(Game):
    def done(self) -> str:
        """Say that you are done."""
        return "well"

    def rates(self) -> str:
        """Look at the rates."""
        return "none"


def test_tools_may_be_called_done_and_rates():
    (sample,) = samples_of([[named(5), named(5)]], game=Tools)
    assert [said["role"] for said in sample.completion] == ["assistant", "tool", "assistant"]
    assert sample.rates == {}


class Counted(Ending):
    @property
    def rates(self) -> dict[str, tuple[int, int]]:
        return {"guesses": (self.guesses, 1)}


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_the_environment_counts_each_call_also_several_of_one_turn(at_a_time):
    sample, _ = play_guesses(2 // at_a_time, "no more", 400, Counted, at_a_time)
    assert len(sample.completion) == 2 // at_a_time + 2
    assert sample.rates == {"guesses": (2, 1)}


class Misconfigured(Game):
    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: A five-letter word.
        """
        raise ConfigError("set another length")


def test_a_wrong_setting_of_an_environment_is_no_answer_to_the_policy():
    with pytest.raises(ConfigError, match="set another length"):
        samples_of([[named(5), named(5)]], game=Misconfigured)


TOO_LONG = "This model's maximum context length is 4 tokens. However, your prompt contains"
NO_ROOM = "max_tokens must be at least 1, got 0."


@pytest.mark.parametrize(("refusal", "status"), [(TOO_LONG, 400), (NO_ROOM, 400), ("", 413)])
def test_a_conversation_that_outgrows_the_context_is_cut_off_and_scored(refusal, status):
    if not refusal:
        with pytest.raises(HTTPException) as too_large:
            Completions(lambda: 4, batch=1).count(bytes(1 << 20))
        refusal = too_large.value.detail
    sample, metrics = play_guesses(1, refusal, status)
    assert [said["role"] for said in sample.completion] == ["assistant", "tool"]
    assert sample.metrics["reward"] == 1.0
    assert any(found.get("completions/clipped_ratio") == (True, 1) for found in metrics)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vllm_still_refuses_what_is_too_long_with_these_words():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.params import TokenizeParams

    with pytest.raises(VLLMValidationError, match=TOO_LONG):
        TokenizeParams(max_total_tokens=4, max_output_tokens=1)._token_len_check(None, [0] * 5)
    with pytest.raises(VLLMValidationError, match=NO_ROOM):
        SamplingParams(max_tokens=0)


def test_prompts_that_were_trained_on_are_not_played_again():
    loop = rollout_loop("http://127.0.0.1:1", 1, queue.Queue())
    loop._task = Task(make_dataset("Play Wordle.", 4, seed=0), [])
    played = [(group.number, group.row["seed"]) for group in itertools.islice(loop.games(), 4)]
    assert played == [(3, 3), (5, 1), (7, 3), (8, 0)]


def test_a_trainer_goes_on_behind_what_was_trained_on_and_gives_up_what_was_dropped():
    groups = TrainedGroups((*range(3), 4))
    assert groups.position() == (3, (4,))
    groups.packed({3, 6})
    assert groups.position() == (3, (4,)), "packed only"
    groups.trained(1)
    assert groups.position() == (5, (6,))
    groups.packed(range(7, 20_000))
    groups.trained(1)
    first, later = groups.position()
    assert (first, later) == (20_000, ()), "5 is not waited for for ever"
    assert len(groups) == 19_999


def write_half(samples: "multiprocessing.Queue[object]", written) -> None:
    """What the queue's own thread has done when the process is killed within a sample; then nothing more."""
    os.write(samples._writer.fileno(), struct.pack("!i", 1000) + b"ten bytes.")  # type: ignore[attr-defined]
    written.set()
    time.sleep(PATIENCE_S)


@pytest.mark.full
def test_a_child_that_is_killed_while_it_writes_a_sample_does_not_hold_the_trainer_at_its_end():
    fork = multiprocessing.get_context("fork")
    worker = ReplicaRolloutWorker()
    written = fork.Event()
    worker._process = child = fork.Process(target=write_half, args=(worker.rollout_buffer, written))
    child.start()
    assert written.wait(PATIENCE_S)
    stopping = threading.Thread(target=worker.stop, daemon=True)
    stopping.start()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    assert not child.is_alive()


class Broken(Game):
    def __init__(self, fault: str) -> None:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(fault)


@pytest.mark.live
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param("no such game", "ValueError: no such game", marks=pytest.mark.long),
        ("killed", "it was killed, perhaps .*"),
    ],
)
def test_a_child_that_does_not_start_ends_the_trainer_with_the_cause(fault, cause):
    config = AsyncGRPOConfig(bf16=False, use_cpu=True)
    task = Task(make_dataset("Play Wordle.", 1, seed=0), [], partial(Broken, fault))
    worker = rollouts.make_worker(str(TOKENIZER), config, task, Fleet([]), 1, None)
    with pytest.raises(RolloutError, match=f"^the process that collects rollouts did not start: {cause}$"):
        worker.start()


class Unplayable(Game):
    def reset(self, **row: object) -> None:
        raise ValueError("no such game")


@pytest.mark.long
def test_a_child_that_fails_later_ends_the_trainer_with_the_cause():
    config = AsyncGRPOConfig(bf16=False, use_cpu=True)
    task = Task(make_dataset("Play Wordle.", 1, seed=0), [], Unplayable)
    worker = rollouts.make_worker(str(TOKENIZER), config, task, Fleet(["http://127.0.0.1:1"]), 1, None)
    worker.start()
    sentence = "the process that collects rollouts failed: ValueError: no such game"
    with pytest.raises(RolloutError, match=f"^{sentence}$"):
        soon(lambda: worker.check_health(PATIENCE_S))


def failing_health(worker: ReplicaRolloutWorker, stale_after_s: float = PATIENCE_S) -> str:
    with pytest.raises(RolloutError) as failed:
        worker.check_health(stale_after_s)
    return str(failed.value)


def test_a_child_that_is_killed_or_hangs_ends_the_trainer():
    worker = ReplicaRolloutWorker()
    worker._messages, child = multiprocessing.Pipe(duplex=False)
    worker._heartbeat.value = time.time() - 100
    worker.check_health(1000.0)
    assert "it has not moved for 100 s" in failing_health(worker, 50.0)
    child.close()
    worker._process = mock.Mock(exitcode=-signal.SIGKILL)
    assert "rollouts failed: it was killed, perhaps because the memory is full" in failing_health(worker)
    worker._process.exitcode = 3
    assert "rollouts failed: it ended with exit code 3" in failing_health(worker)


@pytest.mark.parametrize(
    "text", ["41:0-31,42:31-64", "x", "[1]", '{"a": 1}', '[{"weights": {"term": 1}}]', "null"]
)
def test_a_header_of_another_release_is_tried_at_another_replica(text):
    with pytest.raises(aiohttp.ClientError, match="x-policy-versions is of another release"):
        rollouts._made_by({"x-policy-versions": text})
    assert issubclass(aiohttp.ClientError, rollouts._RETRIED)
