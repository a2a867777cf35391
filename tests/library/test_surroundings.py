"""What surrounds a trainer or a replica: forks, folders without write access, proxies, files of Windows."""

import contextlib
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from werkzeug.serving import make_ssl_devcert

import delta_weight_sync
from delta_weight_sync import KeyFormatError
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, PublicKeys, make_keys, writer_keys
from delta_weight_sync.store import open_bucket
from delta_weight_sync.store._s3 import proxy_for
from tests.support.http_server import Request, answering
from tests.support.records import WRITER
from trainer import observe, spaces
from trainer.observe import Pokes, ReplicaWatch
from trainer.spaces import Clients, Fleet

# Children of `os.fork`.

FORKS = {
    "exit": "sys.exit(0)",
    "error": "raise RuntimeError('of a child')",
    "closing": "scratch.close()",
    "forgetting": "del scratch; gc.collect()",
    "grandchild": "os.fork() or sys.exit(0); os.wait()",
    "own_folder": "Scratch()",
}
PARENT = """
import gc, os, sys
from delta_weight_sync.scratch import Scratch

scratch = Scratch()
with scratch as folder:
    (folder / "file").write_text("kept")
    if os.fork() == 0:
        {child}
        sys.exit(0)
    os.wait()
    print(folder, flush=True)
    print((folder / "file").read_text(), flush=True)
    input()
"""


@pytest.mark.parametrize("child", FORKS)
def test_a_forked_child_leaves_its_parents_folder(child, tmp_path):
    """The parent removes its folder at its own end; until then, other processes leave it, too."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(child=FORKS[child])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    with parent:  # it ends when its input ends
        assert parent.stdout
        folder = Path(parent.stdout.readline().strip())
        assert folder.parent == tmp_path
        assert parent.stdout.readline().strip() == "kept"
        another = "from delta_weight_sync.scratch import Scratch; Scratch()"
        subprocess.run([sys.executable, "-c", another], env=environment, check=True)
        assert (folder / "file").read_text() == "kept"
        parent.communicate("\n")
    assert parent.returncode == 0
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, time
from delta_weight_sync.scratch import Scratch

scratch = Scratch()
if os.fork() == 0:
    os._exit(0)
os.wait()
print(scratch.path, flush=True)
time.sleep(60)
"""


def test_the_folder_of_a_killed_process_is_removed_though_it_had_forked(tmp_path, monkeypatch):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        folder = Path(process.stdout.readline().strip())
        process.kill()
    assert folder.is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Scratch() as mine:
        assert list(tmp_path.iterdir()) == [mine]


TRAINER = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from delta_weight_sync import Publisher

here = Path(sys.argv[1])
(here / "base").mkdir()
(here / "base" / "config.json").write_text("{}")
weights = {"w": torch.randn(200, 50).bfloat16()}
save_file(weights, here / "base" / "model.safetensors")
with Publisher((here / "bucket").as_uri(), base=here / "base") as publisher:
    for number in range(10):
        publisher.publish(weights)
        newest = publisher.flush()
        assert publisher._outbox.shortcuts.idle(60)
        if number == 0 and os.fork() == 0:
            sys.exit(0)
        weights["w"].view(-1)[number::100] *= 2
    os.wait()
    print(newest.version, len(newest.jumps), publisher._outbox.shortcuts.folder.exists())
"""


@pytest.mark.full
def test_a_trainer_that_forks_still_makes_shortcuts(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["9", "1", "True"]
    assert "no jumps and anchors" not in done.stderr


# A machine on which only the temporary folder can be written.


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without a place for compiled code; not even root can write there."""
    place = tmp_path_factory.mktemp("site") / "delta_weight_sync"
    source = Path(delta_weight_sync.__file__).parent
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (place, *(path for path in place.rglob("*") if path.is_dir())):
        (folder / "__pycache__").write_text("")
    return place.parent


COMPILED = {
    "codec": """
import numpy as np
from delta_weight_sync import codec

old, new = np.arange(100, dtype=np.uint16), np.arange(100, dtype=np.uint16)
new[7] += 1
patch = codec.diff("w", old, new)
assert patch.index.tolist() == [7]
""",
    "digest": """
import numpy as np
from delta_weight_sync.digest import tensor_digest

assert tensor_digest("w", np.arange(9, dtype=np.uint16))
""",
    "norms": "import delta_weight_sync.vllm.cpu.norms",
}


@pytest.mark.full
@pytest.mark.parametrize("part", COMPILED)
def test_compiled_code_needs_no_folder_that_can_be_written(part, read_only):
    environment = os.environ | {"PYTHONPATH": str(read_only), "HOME": "/proc/none"}
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        environment.pop(name, None)
    script = f"{COMPILED[part]}\nimport delta_weight_sync; print(delta_weight_sync.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(read_only)), "it is the copy"


# A proxy in the environment.

PROXIES = "http_proxy", "https_proxy", "all_proxy"


class Proxy(NamedTuple):
    """What the environment's proxy was asked for."""

    asked: list[str]


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that answers 503 to all requests, as a company's proxy does for hosts that it cannot reach."""
    found = Proxy([])

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        found.asked.append(request.headers["host"])
        return 503, {}, b"no such host"

    with answering(answer) as url:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name in PROXIES:
            monkeypatch.setenv(name, url)
            monkeypatch.setenv(name.upper(), url)
        yield found


def replica(request: Request) -> tuple[int, dict[str, str], bytes]:
    return 200, {"content-type": "application/json"}, b'{"state": "serving"}'


HOSTS = pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])


@HOSTS
def test_a_request_to_a_space_on_this_machine_uses_no_proxy(host, proxy):
    with answering(replica) as url:
        near = url.replace("127.0.0.1", host)
        assert spaces.request(near, "GET", "/ready").status_code == 200
        assert spaces.probe(near, "replica").state == "serving"
    assert proxy.asked == []


def test_a_request_to_a_space_elsewhere_uses_the_proxy(proxy):
    assert spaces.request("http://replica.example", "GET", "/ready").status_code == 503
    assert proxy.asked == ["replica.example"]


@HOSTS
def test_clients_use_the_proxy_only_for_hosts_elsewhere(host, proxy):
    with answering(replica) as url, contextlib.closing(Clients(10.0)) as clients:
        near = url.replace("127.0.0.1", host)
        for place, status in ((near, 200), ("http://replica.example", 503), (near, 200)):
            with clients.stream("GET", f"{place}/status") as answer:
                assert answer.status_code == status
    assert proxy.asked == ["replica.example"]


def test_a_trainer_watches_and_pokes_its_own_machine_without_the_proxy(proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(observe, "_POLL_S", 0.02)
    asked = set[str]()
    all_came = threading.Event()

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        asked.add(request.path.partition("?")[0])
        if {observe.POKE_PATH, "/status"} <= asked:
            all_came.set()
        return replica(request)

    log = RunLogWriter(open_bucket(tmp_path.as_uri(), create=True), "run", WRITER)
    with answering(answer) as url, contextlib.closing(log):
        pokes = Pokes(Fleet([url]))
        watch = ReplicaWatch(Fleet([url]), log)
        with contextlib.closing(pokes), contextlib.closing(watch):
            pokes.send()
            assert all_came.wait(60)
    assert proxy.asked == []


@pytest.mark.parametrize("way", ["request", "clients"])
def test_own_certificates_count_on_this_machine_too(way, proxy, tmp_path, monkeypatch):
    """Where there is a company's proxy, there is often a company's certificate, in SSL_CERT_FILE."""
    file, key = make_ssl_devcert(str(tmp_path / "tls"), host="localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file, key)
    monkeypatch.setenv("SSL_CERT_FILE", file)
    with answering(replica, context) as url, contextlib.closing(Clients(10.0)) as clients:
        near = f"https://localhost:{url.rpartition(':')[2]}"
        if way == "request":
            status = spaces.request(near, "GET", "/ready").status_code
        else:
            with clients.stream("GET", f"{near}/status") as answer:
                status = answer.status_code
    assert status == 200
    assert proxy.asked == []


@pytest.mark.live
@HOSTS
def test_the_wait_for_a_vllm_on_this_machine_uses_no_proxy(host, proxy, monkeypatch):
    from delta_weight_sync.trl import patches

    monkeypatch.setattr(patches, "_SERVER_S", 30)
    with answering(lambda _: (200, {}, b"")) as url:
        began = time.monotonic()
        patches._await_server(url.replace("127.0.0.1", host))
        assert time.monotonic() - began < 10
    assert proxy.asked == []


NEAR = [
    *(
        "http://127.0.0.1:8000",
        "http://127.9.9.9",
        "http://localhost:8000/v1",
        "https://LOCALHOST",
        "http://[::1]:80",
    ),
    *(
        "http://10.1.2.3",
        "http://172.16.0.1",
        "http://192.168.1.7:8000",
        "http://169.254.1.1",
        "http://[fd00::1]",
    ),
    *("http://[fe80::1]:8000", "http://me@127.0.0.1:8000", "http://vllm.localhost", "http://box.local:8000"),
    *("http://host.docker.internal:8000", "http://0.0.0.0:8000"),
]
FAR = [
    *(
        "https://me-replica.hf.space",
        "http://8.8.8.8",
        "http://172.32.0.1",
        "http://[2606:4700::1]",
        "",
        "nonsense",
    ),
    *(
        "http://localhost.example",
        "http://127.0.0.1.example",
        "http://notlocalhost",
        "http://127.0.0.1@example.org",
    ),
    *("http://local", "http://[::1", "http://example.org/127.0.0.1", "http://internal.example.org"),
]


@pytest.mark.parametrize(("url", "expected"), [(u, True) for u in NEAR] + [(u, False) for u in FAR])
def test_near_hosts_are_this_machine_and_private_networks(url, expected):
    assert spaces.is_near(url) is expected


@pytest.mark.parametrize(
    ("url", "variable", "expected"),
    [
        ("http://store.example", "http_proxy", "http_proxy"),
        ("http://store.example", "HTTP_PROXY", "http_proxy"),
        ("https://store.example", "https_proxy", "https_proxy"),
        ("https://store.example", "ALL_PROXY", "all_proxy"),
        ("https://store.example", "http_proxy", ""),
        ("http://store.example", "https_proxy", ""),
    ],
)
def test_the_variable_that_names_a_proxy_is_found(url, variable, expected, monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, "http://proxy.example:3128")
    assert proxy_for(url) == expected


# Files of keys that an editor saved again.

SAVED = {
    "as_it_was": lambda text: text.encode(),
    "byte_order_mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "byte_order_mark_and_line_ends": lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    "mark_and_public_key_first": lambda text: b"\xef\xbb\xbf" + "\n".join(text.splitlines()[::-1]).encode(),
}


@pytest.mark.parametrize("editor", SAVED)
@pytest.mark.parametrize("as_text", [False, True], ids=["path", "text"])
def test_a_key_file_that_an_editor_of_windows_saved_is_read(editor, as_text, tmp_path, monkeypatch):
    for name in (SIGNING_KEY, PUBLIC_KEY):
        monkeypatch.delenv(name, raising=False)
    public = make_keys(tmp_path / "keys")
    (tmp_path / "saved").write_bytes(SAVED[editor]((tmp_path / "keys").read_text()))
    given = str(tmp_path / "saved") if as_text else tmp_path / "saved"
    signing, trusted = writer_keys(given)
    assert signing
    assert signing.public == public
    assert public in trusted
    assert public in PublicKeys.load(given)


def test_a_key_file_in_another_encoding_is_refused_without_its_content(tmp_path):
    make_keys(tmp_path / "keys")
    text = (tmp_path / "keys").read_text()
    (tmp_path / "saved").write_bytes(text.encode("utf-16"))
    with pytest.raises(KeyFormatError, match="keygen") as caught:
        writer_keys(tmp_path / "saved")
    assert text.partition("=")[2][:20] not in str(caught.value)
