"""What the simulated Hub holds: buckets in memory, the content of their files on disk."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from .xet import Term, Xorb, parse_shard

TOKENS = {"hf_write": True, "hf_read": False}  # token -> may it write?


class HubError(Exception):
    """An answer that is not a success, as the real Hub words it."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def now() -> str:
    """The time as the Hub writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class Entry:
    """One file of a bucket."""

    size: int
    xet_hash: str
    uploaded_at: str = field(default_factory=now)

    def to_json(self, path: str) -> dict[str, object]:
        times = {"mtime": self.uploaded_at, "uploadedAt": self.uploaded_at}
        return {"type": "file", "path": path, "size": self.size, "xetHash": self.xet_hash, **times}


@dataclass
class BucketState:
    """One bucket: path -> file."""

    id: str
    private: bool
    created_at: str = field(default_factory=now)
    files: dict[str, Entry] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        size = sum(file.size for file in self.files.values())
        times = {"createdAt": self.created_at, "updatedAt": self.created_at}
        return {"id": self.id, "private": self.private, "size": size, "totalFiles": len(self.files), **times}


class Cas:
    """Content-addressed storage: xorbs as files, an index of their chunks, and the files made of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)
        self.xorbs: dict[str, Xorb] = {}
        self.files: dict[str, list[Term]] = {}

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
        for term in (term for terms in files.values() for term in terms):
            if term.xorb not in self.xorbs:
                raise HubError(400, f"unknown xorb {term.xorb}")
        self.files.update(files)

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


class Hub:
    """All buckets, and the storage behind them."""

    def __init__(self, root: Path) -> None:
        self.cas = Cas(root / "xorbs")
        self.buckets: dict[str, BucketState] = {}

    def authorize(self, authorization: str | None, *, write: bool) -> None:
        """Check an Authorization header; no header at all is an anonymous reader."""
        token = (authorization or "").removeprefix("Bearer ")
        if authorization and token not in TOKENS:
            raise HubError(401, "Invalid credentials in Authorization header")
        if write and not authorization:
            raise HubError(401, "Invalid username or password.")
        if write and not TOKENS[token]:
            raise HubError(403, "Forbidden: this token has no write access")

    def bucket(self, name: str, authorization: str | None, *, write: bool = False) -> BucketState:
        """Look up a bucket on behalf of a caller; to a stranger a private one looks missing."""
        self.authorize(authorization, write=False)
        bucket = self.buckets.get(name)
        if bucket is None or (bucket.private and not authorization):
            raise HubError(404 if authorization else 401, "Repository not found", "RepoNotFound")
        self.authorize(authorization, write=write)
        return bucket
