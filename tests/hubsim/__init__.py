"""A simulated Hugging Face Hub on loopback: buckets and Xet storage, for the real client libraries.

    with HubSim(tmp_path) as hub:
        subprocess.run([...], env=os.environ | hub.env(tmp_path / "home"))

It accepts `huggingface_hub` and `hf_xet` from several processes at once, and fails on demand. It does not
check hashes, expire tokens, limit rates or collect garbage; how close it is to the real Hub is not proven.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx

REPOSITORY = Path(__file__).parents[2]


class HubSim:
    """Runs the simulator as a process of its own for the length of a `with` block."""

    url: str

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.hubsim", str(self.root)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._control = httpx.Client(base_url=f"{self.url}/_sim", trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._control.close()

    def stop(self) -> None:
        """Kill the server: from now on its port refuses connections."""
        self._process.kill()
        self._process.communicate()

    def env(self, home: Path, token: str = "hf_write") -> dict[str, str]:
        """What a client process needs in its environment. `home` must be new for each simulator: the
        client remembers there what it uploaded. The other token is `hf_read`.
        """
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}

    def fault(self, match: str, **how: Any) -> None:
        """Let requests fail whose "METHOD /path" matches; see `faults.Fault` for the ways."""
        self._control.post("/faults", json={"match": match, **how}).raise_for_status()

    def clear(self) -> None:
        """End all faults."""
        self._control.delete("/faults").raise_for_status()

    def requests(self) -> list[str]:
        """Every request so far, as "METHOD /path"."""
        return self._control.get("/requests").json()
