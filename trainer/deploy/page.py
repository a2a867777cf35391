"""A static Space: its files, from a folder or of a run, and the picture of links to it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from trainer.deploy import DeployError
from trainer.deploy.plan import CHECKOUT

_README = "---\ntitle: Delta Weight Sync\nsdk: static\n---\n"
CARD = "card.png"  # 1200 x 630 pixels; the meta tags of web/index.html and of exported pages name it
_TAG = re.compile(rf'(<meta property="og:image" content=")[^"]*({CARD}")')


def stage(folder: Path, out: Path) -> None:
    """Copy the files of a static Space to `out`, a new folder. Skips hidden files and node_modules.

    Follows links. Adds a README.md if there is none. Raises `DeployError` if the Hub could not show the page.
    """
    readme = folder / "README.md"
    if not (folder / "index.html").is_file():
        fix = "name `web`, a run, or a folder that `python -m inference_space.dashboard --export` wrote"
        raise DeployError(f"--static {folder} has no index.html: {fix}")
    if readme.exists() and "sdk: static" not in readme.read_text(errors="replace"):
        raise DeployError(f"{readme} lacks `sdk: static`: write it between two lines of ---")
    try:
        shutil.copytree(folder, out, ignore=shutil.ignore_patterns(".*", "node_modules"))
    except shutil.Error as error:  # such as a link that leads nowhere
        raise DeployError(f"--static {folder}: {error.args[0][0][2]}: remove it") from None
    if not readme.exists():
        (out / "README.md").write_text(_README)


def export(run: str, folder: Path) -> None:
    """Write the dashboard of the run `<bucket>#<run>`, and the replica in a browser, to `folder`. The program
    is another app, so it runs in its own process. Raises `DeployError` with its last line."""
    bucket, _, name = run.partition("#")
    named = ["--run", name] if name else []
    command = [sys.executable, "-m", "inference_space.dashboard", "--bucket", bucket, *named]
    command += ["--export", str(folder)]
    done = subprocess.run(command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DeployError(f"--static {run}: {lines[-1]}")


def name_card(folder: Path, repo_url: str) -> None:
    """Let links to the static Space in `folder` show its card, if it has one. Sites that show links want an
    absolute address. `repo_url` is the address of the Space's repository."""
    card = f"{repo_url}/resolve/main/{CARD}"
    if not (folder / CARD).is_file():
        return
    for page in (folder / "index.html", folder / "watch" / "index.html"):
        if page.is_file():
            text = page.read_text(encoding="utf-8")
            page.write_text(_TAG.sub(lambda tag: f'{tag[1]}{card}"', text), encoding="utf-8")
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8")
    if "\nthumbnail:" not in text:
        readme.write_text(
            text.replace("\nsdk: static", f"\nsdk: static\nthumbnail: {card}", 1), encoding="utf-8"
        )
