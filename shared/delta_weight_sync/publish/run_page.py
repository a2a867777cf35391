"""The README.md of a run's folder, for people who browse the bucket. No program reads this file."""

import json
import re
import shlex
import time

from delta_weight_sync.errors import printable
from delta_weight_sync.records import Manifest
from delta_weight_sync.util import count_text, size_text

_PAGE = """\
# Run {run}

This folder holds the weights of a model during training, as numbered versions that Delta Weight Sync wrote.
Version 0 is whole. Most later versions hold only the weights that changed. Replicas may read these files at
any time, so do not rename, edit or delete them by hand.

- base model: {model}
- created: {created} UTC
- weights: {count} ({size})
- signed: {signed}

The trainer wrote this page when it created the run. The page is not signed.

## Follow the newest version

```bash
delta-weight-sync follow {shell_url} --into newest
```

The folder `newest/current` is then an ordinary {kind} of the newest version. In Python:

```python
from delta_weight_sync import follow

for version in follow({python_url}, into="newest"):
    print(version.version, version.path, version.digest)
```

## List and verify the versions

```bash
delta-weight-sync log {shell_url}
delta-weight-sync verify {shell_url}
```

The second command rebuilds every version, and compares each with the digest that the trainer published.

## Check out one version

```bash
delta-weight-sync checkout {shell_url} --version 0 --out version-0
```
"""
_SIGNED = (
    "yes. Get the trainer's public key from the trainer's owner, and set `DELTA_WEIGHT_SYNC_PUBLIC_KEY` to it"
)


def run_page(bucket_url: str, model: str, first: Manifest) -> bytes:
    """The page of a run, in Markdown.

    Args:
        bucket_url: URL of the bucket.
        model: Name of the base model.
        first: The manifest of version 0.
    """
    url = printable(f"{bucket_url}#{first.run}")
    page = _PAGE.format(
        run=_code(first.run),
        kind="PEFT adapter" if first.anchor.is_adapter else "Hugging Face checkpoint",
        model=_code(model),
        created=time.strftime("%Y-%m-%d %H:%M", time.gmtime(first.born)),
        count=count_text(first.total),
        size=size_text(first.full_bytes),
        signed=_SIGNED if first.signature else "no",
        shell_url=shlex.quote(url),
        python_url=json.dumps(url),
    )
    return page.encode(errors="replace")


def _code(text: str) -> str:
    """Any text as a code span of Markdown, in which nothing is markup."""
    text = printable(text).strip() or "unknown"
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"
