"""How far the download of a version is, for whoever waits for a replica to wake."""

from __future__ import annotations

from pathlib import Path

from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import FileRef

_STEPS = 10  # what is said changes so often: it is also written to the run's log


class CountingReader(RunReader):
    """A reader that counts what it has fetched, also of the file that is on its way."""

    _wanted, _fetched, _folder = 0, 0, Path("/nowhere")

    def expect(self, manifest: Manifest, folder: Path) -> None:
        """From now on count the download of this version to `folder`, from its anchor on."""
        self._wanted, self._fetched, self._folder = manifest.way().size, 0, folder

    def fetch(self, ref: FileRef, folder: Path) -> Path:
        """As in `RunReader`."""
        path = super().fetch(ref, folder)
        self._fetched += ref.size
        return path

    def progress(self) -> str:
        """So many megabytes of all, such as "27 of 269 MB", in tenths of the whole."""
        parts = _coming(self._folder)
        share = _STEPS * min(self._fetched + parts, self._wanted) // max(self._wanted, 1)
        digits = 0 if self._wanted >= 10e6 else 1
        return f"{share * self._wanted / _STEPS / 1e6:.{digits}f} of {self._wanted / 1e6:.{digits}f} MB"


def _coming(folder: Path) -> int:
    """Bytes of the files that are on their way."""
    try:
        return sum(part.stat().st_size for part in folder.glob("**/.*.part"))
    except FileNotFoundError:  # one was finished, or its folder removed, meanwhile
        return 0
