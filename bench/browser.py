"""Makes what web/ ships and what docs/watch-in-a-browser.md states.

python -m bench.browser record file:///…/bucket#demo    web/run: a signed run of every fourth of its versions
python -m bench.browser preview FOLDER                  previews of the anchors in a bucket on this disk
python -m bench.browser play                            web/test/greedy.json: vLLM's greedy games on it
python -m bench.browser phone                           first play and join in a throttled Chromium
python -m bench.browser speed                           decoding by Python and by Node, sizes of the page
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from env_space.game import Game, Rules, guesses
from env_space.settings import Settings
from tests.support.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WEB = Path(__file__).parents[1] / "web"
POLICY = WEB.parent / "trainer" / "policies" / "wordle-tiny"
RUN = "demo"
GUESS = '<tool_call>\n{"name": "guess", "arguments": {"word": "'
END = '"}}\n</tool_call>'


def record(url: str, every: int) -> None:
    """Publish every `every`-th version of a run anew, signed with a key that nobody keeps."""
    import torch

    from delta_weight_sync import Publisher
    from delta_weight_sync.reader import open_run
    from delta_weight_sync.signing import SIGNING_KEY, SigningKey, new_pair

    folder = WEB / "run"
    source = open_run(url)
    shutil.rmtree(folder, ignore_errors=True)
    newest = source.manifest().version
    key = new_pair()[SIGNING_KEY]
    options: dict[str, Any] = {"encoding": "small", "state_minutes": 1e9, "signing_key": key}
    with Publisher(f"{folder.as_uri()}#{RUN}", base=POLICY, **options) as publisher:
        for version in range(0, newest + 1, every):
            with tempfile.TemporaryDirectory() as scratch:
                bits = source.checkout(source.manifest(version), Path(scratch))
            weights = {name: torch.from_numpy(b).view(torch.bfloat16) for name, b in bits.items()}
            publisher.publish(weights, version)
            publisher.flush()
    for unused in ("state", "log"):
        shutil.rmtree(folder / "runs" / RUN / unused, ignore_errors=True)
    preview(folder, replace=True)
    (first,) = folder.rglob("first.safetensors")
    print(f'for index.html: data-keys="{SigningKey(key).public}" data-first="{first.relative_to(folder)}"')


def preview(folder: Path, replace: bool) -> None:
    """Split the weights of each anchor into two files: browsers play with the first before the rest has come.

    `replace`: delete the whole files. Then only browsers can read the run.
    """
    from safetensors.numpy import save

    named = {"format": "delta-weight-sync-preview/1"}
    for path in folder.glob("runs/*/anchors/*/model.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        bits = np.frombuffer(content, "<u2", offset=start)
        four = np.pad(bits, (0, -bits.size % 4)).reshape(-1, 4).astype(np.uint32)
        # Sign and highest bit of the mantissa: two bits per weight. The rest of the mantissa: six.
        tops = ((four >> 14 & 2 | four >> 6 & 1) << np.arange(0, 8, 2, dtype=np.uint32)).sum(axis=1)
        lows = ((four & 0x3F) << np.arange(0, 24, 6, dtype=np.uint32)).sum(axis=1).astype("<u4")
        exponents = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
        streams = {
            "head": zlib.compress(content[:start], 9),
            "exponents": exponents.compress((bits >> 7).astype(np.uint8).tobytes()) + exponents.flush(),
            "tops": tops.astype(np.uint8).tobytes(),
        }
        for name in ("config.json", "tokenizer.json"):
            streams[name] = zlib.compress(path.with_name(name).read_bytes(), 9)
        first = {name: np.frombuffer(stream, np.uint8) for name, stream in streams.items()}
        low = np.ascontiguousarray(lows.view(np.uint8).reshape(-1, 4)[:, :3]).reshape(-1)
        path.with_name("first.safetensors").write_bytes(save(first, named))
        path.with_name("rest.safetensors").write_bytes(save({"low": low}, named))
        if replace:
            path.unlink()
    listed = folder / "keys.json"
    if replace or listed.exists():
        keys = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        listed.write_text(json.dumps(sorted(keys - {"keys.json"}), indent=0) + "\n")
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    print(f"{folder}: {len(sizes)} files, {sum(sizes)} bytes")


def _restore(folder: Path) -> None:
    """Write the whole files that `preview` split."""
    from safetensors.numpy import load_file

    for path in folder.glob("runs/*/anchors/*/first.safetensors"):
        first = load_file(path)
        low = load_file(path.with_name("rest.safetensors"))["low"]
        exponents = np.frombuffer(zlib.decompress(first["exponents"]), np.uint8).astype(np.uint16)
        tops = (
            (first["tops"][:, None] >> np.arange(0, 8, 2) & 3).reshape(-1)[: exponents.size].astype(np.uint16)
        )
        three = np.pad(low.reshape(-1, 3), ((0, 0), (0, 1))).view("<u4")
        lows = (three >> np.arange(0, 24, 6) & 0x3F).reshape(-1)[: exponents.size].astype(np.uint16)
        bits = tops >> 1 << 15 | exponents << 7 | (tops & 1) << 6 | lows
        path.with_name("model.safetensors").write_bytes(zlib.decompress(first["head"]) + bits.tobytes())


def play(games: int) -> None:
    """Let vLLM play games with held-out words, greedily, with the newest version of web/run."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as copy:
        shutil.copytree(WEB / "run", copy, dirs_exist_ok=True)
        _restore(Path(copy))
        # In another process, because this vLLM does not start beside numba's modules.
        command = [
            sys.executable,
            "-m",
            "delta_weight_sync",
            "checkout",
            Path(copy).as_uri(),
            "--out",
            folder,
        ]
        subprocess.run(command, check=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        llm = LLM(
            folder, dtype="bfloat16", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20
        )
    rules = Rules(Settings())
    played = [(Game(secret, guesses()), [], []) for secret in rules.held_out[:games]]
    sampling = SamplingParams(temperature=0, max_tokens=7, stop_token_ids=[1, 261], skip_special_tokens=False)
    while open_games := [one for one in played if not one[0].over and len(one[1]) == one[0].turns]:
        prompts = [
            {"prompt_token_ids": tokenizer.encode(_conversation(texts, answers))}
            for _, texts, answers in open_games
        ]
        for (game, texts, answers), output in zip(open_games, llm.generate(prompts, sampling), strict=True):
            texts.append(tokenizer.decode(output.outputs[0].token_ids))
            if texts[-1].startswith(GUESS) and texts[-1].endswith(END):
                answers.append(game.guess(texts[-1][len(GUESS) : -len(END)]).observation)
    rows = [[game.secret, *texts] for game, texts, _ in played]
    short = [[text.removeprefix(GUESS).removesuffix(END) for text in row] for row in rows]
    (WEB / "test" / "greedy.json").write_text(json.dumps(short) + "\n")
    print(f"{sum(game.solved for game, _, _ in played)} of {games} games solved")


def _conversation(texts: list[str], answers: list[str]) -> str:
    turns = [
        f"{text}<|im_end|>\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>"
        for text, answer in zip(texts, answers, strict=True)
    ]
    start = "<|im_start|>assistant\n"
    return "\n".join(["<|im_start|>user\nPlay Wordle.<|im_end|>", *(start + turn for turn in turns), start])


def speed() -> None:
    """Print a row for each mode: one delta of 16.8 million weights, decoded by both, and the page's size."""
    from delta_weight_sync import codec
    from delta_weight_sync.digest import state_digest

    rng = np.random.default_rng(0)
    old = (rng.normal(0, 0.02, 1 << 24).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    chance = np.where((old >> 7 & 0xFF) >= 0x78, 0.002, 0.02)  # small weights change more often
    step = np.where(rng.random(old.size) < chance, rng.choice([1, 65535], old.size), 0).astype(np.uint16)
    far = np.where(rng.random(old.size) < 0.6, rng.integers(40, 60, old.size), 0).astype(np.uint16)
    shapes = {"w": old.shape}
    for name, steps, encoding in (("fast", step, "fast"), ("small", step, "small"), ("dense", far, "fast")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "delta")
            patch = codec.diff("w", old, old + steps)
            path.write_bytes(
                codec.encode([patch], {"w": old}.__getitem__, base=0, version=1, encoding=encoding)
            )
            Path(folder, "bits").write_bytes(old.tobytes())
            modes = [group.mode for group in codec.Delta(path).groups]
            decoded = _median_ms(lambda path=path: list(codec.Delta(path).patches(shapes, lambda _: old)))
            command = ["node", str(Path(__file__).with_suffix(".mjs")), folder]
            node = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            digested = _median_ms(lambda: state_digest({"w": old}))
            size = path.stat().st_size
        print(f"{name} {modes} {size / 1e6:.2f} MB, {np.count_nonzero(steps)} changes: decoding Python"
              f" {decoded:.0f} ms, Node {node['decoded']:.0f} ms; digest Python {digested:.0f} ms,"
              f" Node {node['digested']:.0f} ms")  # fmt: skip
    page = [WEB / "index.html", WEB / "style.css", WEB / "icon.svg", *(WEB / "src").glob("*.js")]
    packed = sum(len(gzip.compress(path.read_bytes())) for path in page)
    print(f"page: {sum(path.stat().st_size for path in page)} bytes, {packed} compressed")


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


PHONE = {
    "offline": False,
    "latency": 150,
    "downloadThroughput": 200_000,
    "uploadThroughput": 93_750,
}  # ms, B/s
SLOWER = 4  # the factor by which the CPU is slowed


class _Served(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def end_headers(self) -> None:
        if not self.path.endswith((".safetensors", ".json")):
            self.send_header("cache-control", "max-age=60")
        super().end_headers()


class _Compressed(_Served):
    """As a host like a static Space: text travels in gzip."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if path.suffix not in (".html", ".css", ".js", ".txt", ".json", ".svg") or not path.is_file():
            super().do_GET()
            return
        content = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("content-type", self.guess_type(path))
        self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def phone(times: int) -> None:
    """Print when a throttled phone may guess, sees the policy's first guess, and has joined."""
    for handler in (_Served, _Compressed):
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(WEB))) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with chromium() as browser:
                rows = [_on_a_phone(browser, f"http://127.0.0.1:{server.server_port}/") for _ in range(times)]
            server.shutdown()
        for name in rows[0]:
            values = sorted(row[name] for row in rows)
            print(f"{handler.__name__} {name}: {values[0]:.2f} to {values[-1]:.2f}, median"
                  f" {statistics.median(values):.2f}")  # fmt: skip


def _on_a_phone(browser: Browser, url: str) -> dict[str, float]:
    """Seconds from the start of the navigation, and KB that had come by the policy's first guess."""
    options: dict[str, Any] = {
        "viewport": {"width": 390, "height": 844},
        "is_mobile": True,
        "has_touch": True,
    }
    with browser.new_context(**options, device_scale_factor=3) as context:
        page = context.new_page()
        page.add_init_script(path=Path(__file__).with_name("browser_phone.js"))
        protocol = context.new_cdp_session(page)
        for method, given in {
            "Network.enable": {},
            "Network.emulateNetworkConditions": PHONE,
            "Emulation.setCPUThrottlingRate": {"rate": SLOWER},
        }.items():
            protocol.send(method, given)
        came: list[float] = []
        protocol.on("Network.dataReceived", lambda part: came.append(part["encodedDataLength"]))
        page.goto(url, wait_until="commit")
        page.locator("#its [data-feedback]").first.wait_for(state="attached", timeout=120_000)
        kilobytes = sum(came) / 1e3
        page.locator("body[data-version]").wait_for(state="attached", timeout=120_000)
        page.wait_for_timeout(200)  # its timer notes it
        noted: dict[str, float] = page.evaluate("noted")
    return {name: ms / 1000 for name, ms in noted.items()} | {"KB to the first guess": kilobytes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m bench.browser")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("url")
    recording.add_argument("--every", type=int, default=4)
    playing = commands.add_parser("play")
    playing.add_argument("--games", type=int, default=200)
    splitting = commands.add_parser("preview")
    splitting.add_argument("folder", type=Path)
    splitting.add_argument("--replace", action="store_true", help="delete the whole files, for browsers only")
    throttled = commands.add_parser("phone")
    throttled.add_argument("--times", type=int, default=5)
    commands.add_parser("speed")
    given = vars(parser.parse_args())
    globals()[given.pop("command")](**given)
