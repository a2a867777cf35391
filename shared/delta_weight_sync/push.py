"""Writes a version to the Hub as an ordinary model repository."""

import json
import os
import re
from pathlib import Path
from typing import Final

from delta_weight_sync.errors import BucketError, ConfigError, ObjectMissingError, ProtocolError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest, RunInfo, parse
from delta_weight_sync.scratch import Scratch

_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CARD: Final = """\
---
library_name: {library}
{metadata}---

# {title}

Version {version} of the run `{run}`, published during training by Delta Weight Sync.

| | |
|---|---|
| run | `{run}` |
| version | {version} |
| step of the trainer | {sync} |
| digest of all weights | `{digest}` |
| signed | {signed} |
"""


def push_version(reader: RunReader, manifest: Manifest, to: str, *, public: bool = False) -> str:
    """Write a version to the model repository `to`, which is created if missing.

    Files of weights that the repository has and the version has not are deleted there; its other files stay.

    Args:
        reader: Reads the run.
        manifest: The version.
        to: The repository, such as "me/model".
        public: Make a new repository public; by default it is private. An existing one stays what it is.

    Returns:
        The URL of the commit.

    Raises:
        ConfigError: `to` is not the name of a repository.
        BucketError: The Hub refused the upload, or the bucket cannot be read.
        ProtocolError, CodecError: As for `Run.checkout`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    if not _ID.fullmatch(to):
        raise ConfigError(f"{to!r} is not a model repository: write it as owner/name, such as me/model")
    with Scratch() as folder:
        reader.checkout(manifest, folder)
        (folder / "README.md").write_text(_card(reader, manifest, to))
        try:
            api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
            api.create_repo(to, private=not public, exist_ok=True)
            done = api.upload_folder(
                repo_id=to,
                folder_path=Path(folder),
                commit_message=f"Version {manifest.version} of run {manifest.run}",
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            )
        except (HfHubHTTPError, HTTPError) as error:
            fix = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise BucketError(f"{to} could not be written ({why}): {fix}") from error
    return str(done.commit_url)


def _card(reader: RunReader, manifest: Manifest, to: str) -> str:
    """The model card, in Markdown."""
    metadata = ""
    try:
        model = parse(RunInfo, reader.bucket.get(reader.keys.info), reader.keys.info).model
        metadata = f"base_model: {json.dumps(model)}\n" if _ID.fullmatch(model) else ""
    except (ObjectMissingError, ProtocolError):  # a card without its base is better than none
        pass
    return _CARD.format(
        library="peft" if manifest.anchor.is_adapter else "transformers",
        metadata=metadata,
        title=to.partition("/")[2],
        version=manifest.version,
        run=manifest.run,
        sync=manifest.sync,
        digest=manifest.digest,
        signed="yes" if manifest.signature else "no",
    )
