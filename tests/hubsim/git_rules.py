"""What .gitattributes and .gitignore say of a path, for the patterns that people write."""

from fnmatch import fnmatchcase

# Part of what the Hub puts into every new repository.
LARGE = (
    "7z arrow bin bz2 ckpt gz h5 joblib npy npz onnx parquet pickle pkl pt pth safetensors tar tgz xz zip zst"
)
ATTRIBUTES = "".join(f"*.{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in LARGE.split())


def is_large(path: str, attributes: str) -> bool:
    """Does .gitattributes send the path to the storage for large files?"""
    lines = [line.split() for line in attributes.splitlines() if not line.startswith("#")]
    return any(_matches(path, words[0]) for words in lines if "filter=lfs" in words)


def is_ignored(path: str, gitignore: str) -> bool:
    """Does .gitignore exclude the path, or a folder above it? Exceptions with "!" are not understood."""
    patterns = [
        line.strip().strip("/") for line in gitignore.splitlines() if line.strip()[:1] not in ("", "#")
    ]
    parts = path.split("/")
    above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return any(_matches(part, pattern) for part in above for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path if "/" in pattern else path.split("/")[-1], pattern)
