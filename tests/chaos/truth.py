"""What trainers handed over, in a local file that no fault touches."""

from __future__ import annotations

import os
from pathlib import Path

RUN = "chaos"


class Truth:
    """Lines of writer, sync and digest, each written before the weights are handed to the publisher."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._known: dict[tuple[str, int], str] = {}
        path.touch()

    def tell(self, writer: str, sync: int, digest: str) -> None:
        line = f"{writer} {sync} {digest}\n".encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.write(file, line)
        os.close(file)

    def digest(self, writer: str, sync: int) -> str | None:
        self._refresh()
        return self._known.get((writer, sync))

    def holds(self, digest: str) -> bool:
        self._refresh()
        return digest in self._known.values()

    def _refresh(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode().splitlines():
            writer, sync, digest = line.split()
            self._known[writer, int(sync)] = digest
