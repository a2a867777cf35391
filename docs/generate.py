"""Hook of mkdocs: fills the generated parts of the pages, and brings in the pages of the repository's root.

A page marks the place of a generated part with `<!-- generated: NAME -->`; NAME is a key of `PARTS`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PROGRAMS = {  # how a user starts it -> module
    "delta-weight-sync": "delta_weight_sync",
    "python -m trainer.demo": "trainer.demo",
    "python -m trainer.deploy": "trainer.deploy",
    "python -m inference_space.dashboard": "inference_space.dashboard",
}
PACKAGES = (
    "shared/delta_weight_sync",
    "shared/space_guard",
    "trainer",
    "inference_space",
    "env_space",
)
_MARK = re.compile(r"<!-- generated: (\w+) -->")
_OUTWARD = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([\w./-]+)(#[\w-]+)?\)")
_COMMAND = re.compile(r"^    (\w[\w-]*)  ", re.MULTILINE)


def tree() -> str:
    """Every module of the programs with the first sentence of its docstring."""
    lines = []
    for package in PACKAGES:
        files = sorted((ROOT / package).rglob("*.py"), key=lambda file: (file.parent, file.name))
        for file in files:
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            first = " ".join(text.split("\n\n")[0].split())
            name = file.relative_to(ROOT / package)
            if file.name == "__init__.py":
                if str(name.parent) == "." or first:
                    lines.append(f"\n**`{file.parent.relative_to(ROOT)}/`** {first}\n")
            elif file.name != "__main__.py" or first:
                lines.append(f"- `{name}`: {first}")
    return re.sub(r"(\*\*`[^\n]*\n)\n*(?=- )", r"\1\n", "\n".join(lines))


def command_line() -> str:
    """The help of every command, as the programs print it."""
    listed = {start: _help(module) for start, module in PROGRAMS.items()}
    asked = [(start, name) for start, text in listed.items() for name in _COMMAND.findall(text)]
    with ThreadPoolExecutor(2) as pool:
        texts = dict(
            zip(asked, pool.map(lambda words: _help(PROGRAMS[words[0]], words[1]), asked), strict=True)
        )
    parts = []
    for start, text in listed.items():
        parts.append(f"## {start}\n\n```text\n{text}```\n")
        parts += [
            f"### {start} {name}\n\n```text\n{part}```\n"
            for (owner, name), part in texts.items()
            if owner == start
        ]
    return "\n".join(parts)


def _help(module: str, *words: str) -> str:
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(ROOT / "shared"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", module, *words, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def api() -> str:
    """Directives of mkdocstrings for the names in `delta_weight_sync.__all__`."""
    names = sorted(exported("errors") + exported("__init__"))
    return "\n\n".join(f"::: delta_weight_sync.{name}" for name in names if not name.startswith("__"))


def exported(module: str) -> list[str]:
    """The names that a module of the library writes into its `__all__`."""
    tree = ast.parse((ROOT / f"shared/delta_weight_sync/{module}.py").read_text())
    lists = (node for node in tree.body if isinstance(node, ast.Assign))
    values = next(node.value for node in lists if getattr(node.targets[0], "id", "") == "__all__")
    assert isinstance(values, ast.List)
    return [name.value for name in values.elts if isinstance(name, ast.Constant)]


PARTS = {"tree": tree, "cli": command_line, "api": api}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, page in ROOT_PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        text = re.sub(r"\[([^\]]+)\]\((?!https?:|#|[\w/-]+\.md)[^)]*\)", r"\1", text)
        files.append(File.generated(config, page, content=_between_root_pages(text)))
    return files


def _between_root_pages(text: str) -> str:
    for name, page in ROOT_PAGES.items():
        text = text.replace(f"]({name}", f"]({page}")
    return text


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the generated parts; a link to a file that is not part of the site becomes its name."""

    def outward(link: re.Match[str]) -> str:
        text, up, target, anchor = link.groups()
        here = (ROOT / "docs" / page.file.src_path).parent
        path = os.path.relpath(os.path.normpath(here / up / target), ROOT)
        if path.startswith("docs/"):
            return link[0]
        if path in ROOT_PAGES:
            return f"[{text}]({os.path.relpath(ROOT / 'docs' / ROOT_PAGES[path], here)}{anchor or ''})"
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _MARK.sub(lambda mark: PARTS[mark[1]](), _OUTWARD.sub(outward, markdown))
