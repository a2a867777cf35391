"""The worked examples of docs/wire-format.md, made by the project's own writer.

    python -m tests.library.wire_examples      writes them into the page

A place is `<!-- wire:NAME -->` up to `<!-- /wire -->`; NAME is one of `EXAMPLES`.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard

from delta_weight_sync import codec
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.records import FileRef, Head, Keys, Writer
from tests.library.wire_reader import safetensors

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"
_PLACE = re.compile(r"(<!-- wire:(\w+) -->\n).*?(<!-- /wire -->)", re.DOTALL)
Bits = np.ndarray
_SHOWN = 24  # changes


def head() -> str:
    writer, keys = Writer(1, "0123456789abcdef" * 2), Keys("demo")
    manifest = FileRef(key=keys.manifest(7, writer), size=2, sha256=_sha256(b"{}"))
    sealed = Head(
        run="demo", born=1.75e9, version=7, manifest=manifest, writer_term=writer.term, writer=writer.id
    )
    text = sealed.to_bytes().decode()
    without = "Head\n" + text.replace(f'"seal":"{sealed.seal}","signature":"",', "")
    return "\n".join(
        [
            keys.head(writer),
            *_wrapped(text),
            "its seal is the sha256 of the word Head, a line feed, and",
            *_wrapped(without.removeprefix("Head\n")),
            f"  {_sha256(without.encode())}",
        ]
    )


def digest() -> str:
    zeros, small, long = np.zeros(3, np.uint16), _numbers(0x3F80, 0, 0x8000), np.arange(5000, dtype=np.uint16)
    rows = [
        ("w = [0000 0000 0000]", {"w": zeros}),
        ("w = [3f80 0000 8000]", {"w": small}),
        ("v = [3f80 0000 8000]", {"v": small}),
        ("both of these", {"w": small, "v": small}),
        ("w = [0000 0001 … 1387], 5000 weights", {"w": long}),
    ]
    return "\n".join(f"{name:38} {to_hex(state_digest(state))}" for name, state in rows)


def gaps() -> str:
    old = np.full((4, 16), 0x3C00, np.uint16)
    new = _moved(old, {5: 1, 6: -1, 20: 3, 41: 1})
    return _explained(old, new, "fast", "gaps")


def bands() -> str:
    """Every other weight is a thousand times smaller, and those change."""
    old = np.tile(_numbers(0x3F80, 0x3A80), (8, 16))
    new = _moved(old, {at: 1 if at % 16 == 1 else -1 for at in range(1, 256, 8)} | {7: -2, 100: 1})
    return _explained(old, new, "small", "bands")


def planes() -> str:
    """Changes side by side, steps of every size, and weights that have nothing to do with the old ones."""
    at = np.arange(512)
    old, uneven = np.full(512, 0x3C00, np.uint16), (at * 2654435761 >> 7 & 0xFFFF).astype(np.uint16)
    steps = np.tile([1, -1, 300, 0, 2, -2, -300, 1], 64)
    examples = {
        "mask": (old, old + (at // 32 % 4 == 1).astype(np.uint16)),
        "dense": (old, (old + steps).astype(np.uint16)),
        "raw": (uneven, np.tile(_numbers(0x3F80, 0xBF80, 0x0001, 0x7FC0), 128)),
    }
    return "\n\n".join(_explained(*pair, "fast", mode) for mode, pair in examples.items())


EXAMPLES: dict[str, Callable[[], str]] = {f.__name__: f for f in (head, digest, gaps, bands, planes)}


def _explained(old: Bits, new: Bits, encoding: str, mode: str = "") -> str:
    patch = codec.diff("w", old, new)
    data = codec.encode([patch], {"w": old}.__getitem__, base=6, version=7, encoding=encoding)
    header, content = safetensors(data)
    end = 8 + int.from_bytes(data[:8], "little")
    found = re.findall(r'"mode": "(\w+)"', header["__metadata__"].get("groups", ""))
    assert found == [mode] * bool(mode), f"this is no example of {mode}, but of {found}"
    pairs = list(zip(patch.index, patch.ulps.astype(np.int16), strict=True))
    steps = " ".join(f"{at}:{step:+d}" for at, step in pairs[:_SHOWN]) + (" …" if pairs[_SHOWN:] else "")
    lines = [
        f"{mode or encoding}: w has shape {list(old.shape)}, old bits {_few(old)}",
        *_wrapped(f"changes, position:step  {steps}"),
        f"the file, {len(data)} bytes: length of the header {data[:8].hex(' ')}, header",
        *_wrapped(data[8:end].decode().rstrip()),
        f"and {end - 8 - len(data[8:end].rstrip())} spaces; then",
        *(line for name, stream in content.items() for line in _stream(name, stream)),
    ]
    return "\n".join(lines)


def _stream(name: str, stream: bytes) -> list[str]:
    if not stream:
        return [f"  {name:12} (empty)"]
    if stream[:4] == b"\x28\xb5\x2f\xfd":
        inside = zstandard.ZstdDecompressor().decompress(stream)
        unpacked = f"  unpacked   {inside[:24].hex(' ')} … ({len(inside)} bytes)"
        return [*_wrapped(f"{name:12} {stream.hex(' ')}"), *_wrapped(unpacked)]
    bits = " ".join(f"{byte:08b}"[::-1] for byte in stream)
    return [
        *_wrapped(f"{name:12} {stream.hex(' ')}"),
        *(_wrapped(f"  bits       {bits}") if len(stream) < 32 else []),
    ]


def _few(old: Bits) -> str:
    flat = [f"{value:04x}" for value in old.reshape(-1)[:4].tolist()]
    return " ".join(flat) + (" …" if old.size > 4 else "")


def _moved(old: Bits, steps: dict[int, int]) -> Bits:
    move = np.zeros(old.size, np.int64)
    move[list(steps)] = list(steps.values())
    return (old + move.reshape(old.shape)).astype(np.uint16)


def _numbers(*values: int) -> Bits:
    return np.array(values, np.uint16)


def _wrapped(text: str, width: int = 100) -> list[str]:
    return ["  " + text[at : at + width] for at in range(0, len(text), width)]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def filled(text: str) -> str:
    """The page with every place written anew."""
    return _PLACE.sub(lambda m: f"{m[1]}```text\n{EXAMPLES[m[2]]()}\n```\n{m[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
