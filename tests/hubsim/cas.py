"""Xet's content-addressed storage: xorbs as files on disk, their chunks, and the files made of those."""

import re
from pathlib import Path

from .errors import HubError
from .xet import Term, Xorb, parse_shard


class Cas:
    """Files by their Xet hash, as the chunks that they are made of; repositories know them by SHA-256."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)
        self.xorbs: dict[str, Xorb] = {}
        self.files: dict[str, list[Term]] = {}
        self.by_sha256: dict[str, str] = {}  # SHA-256 -> Xet hash

    def put_xorb(self, name: str, data: bytes) -> bool:
        """Store a xorb; False if it was there already."""
        if name in self.xorbs:
            return False
        index = Xorb.parse(data)
        (self.root / name).write_bytes(data)
        self.xorbs[name] = index
        return True

    def put_shard(self, data: bytes) -> None:
        """Make the files of a shard known; every xorb that they use must be here already."""
        files = parse_shard(data)
        for term in (term for file in files for term in file.terms):
            if term.xorb not in self.xorbs:
                raise HubError(400, f"unknown xorb {term.xorb}")
        self.files |= {file.hash: file.terms for file in files}
        self.by_sha256 |= {file.sha256: file.hash for file in files if file.sha256}

    def size(self, file_hash: str) -> int:
        """Bytes of a file, unpacked."""
        return sum(term.size for term in self.files[file_hash])

    def reconstruct(self, file_hash: str, start: int, stop: int) -> tuple[int, list[Term]]:
        """The chunks that hold bytes [start, stop) of a file, and how many of their first bytes to skip."""
        skip, terms, position = 0, [], 0
        for term in self.files[file_hash]:
            if position < stop and start < position + term.size:
                before, trimmed = self._trim(term, start - position, stop - position)
                if not terms:
                    skip = start - position - before
                terms.append(trimmed)
            position += term.size
        return skip, terms

    def _trim(self, term: Term, start: int, stop: int) -> tuple[int, Term]:
        """Drop the chunks outside bytes [start, stop) of a term; also says how many bytes went in front."""
        sizes = self.xorbs[term.xorb].sizes
        first, last, before, size = term.start, term.end, 0, term.size
        while before + sizes[first] <= start:
            before += sizes[first]
            first += 1
        while size - sizes[last - 1] >= stop:
            last -= 1
            size -= sizes[last]
        return before, Term(term.xorb, first, last, size - before)


def parse_range(header: str, size: int) -> tuple[int, int]:
    """A Range header as a half-open interval that lies within `size` bytes."""
    first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", header).groups()
    if int(first) >= size > 0:
        raise HubError(416, "Range Not Satisfiable")
    return int(first), min(int(last) + 1, size) if last else size
