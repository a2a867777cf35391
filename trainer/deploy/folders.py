"""`python -m trainer.deploy.folders FOLDER`: the Spaces' folders as release files, the same bytes each time.

Each Space gets a folder that `hf upload` takes as it is, and a tar file of it for a release. They depend only
on what git tracks, and name no owner.
"""

import argparse
import gzip
import hashlib
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from trainer.deploy import DeployError, page
from trainer.deploy.plan import APPS, CHECKOUT, git_files, stage

Stage = Callable[[Path], None]
NAMES = {"env": "wordle-env", "replica": "wordle-replica", "page": "wordle-page"}  # of the folders


def main(argv: list[str] | None = None) -> None:
    """Write the folders, and print the commands that upload them."""
    parser = argparse.ArgumentParser(prog="python -m trainer.deploy.folders", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    folder = parser.parse_args(argv).folder
    try:
        for archive in write(folder):
            print(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive}")
    except (DeployError, OSError) as error:
        sys.exit(f"folders: {error}")
    print("\nto make a Space of your own from one of them, with ME for your account:\n")
    for app, name in NAMES.items():
        sdk = "static" if app == "page" else "docker"
        print(f"hf repos create ME/{name} --type space --sdk {sdk} --private --exist-ok")
        print(f"hf upload ME/{name} {folder / name} . --type space")
    print("\nthe Space's page then says which variables and secrets it lacks")


def write(folder: Path) -> list[Path]:
    """Write each folder and its archive; returns the archives. Raises `DeployError` as `plan.files` does."""
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"{folder} is not empty: name a new folder")
    stages: dict[str, Stage] = {app: lambda out, app=app: stage(app, out) for app in APPS}  # type: ignore[misc]
    stages["page"] = _stage_page
    archives = []
    for app, make in stages.items():
        out = folder / NAMES[app]
        make(out)
        archives.append(_archive(out))
    return archives


def _stage_page(out: Path) -> None:
    """Write the replica in a browser, without what git ignores, such as a build's files."""
    if untracked := git_files("--others", "web/*"):
        raise DeployError(f"git does not track {', '.join(sorted(untracked))}: `git add` or remove it")
    page.stage(CHECKOUT / "web", out)
    for ignored in git_files("--others", "--ignored", "web/*"):
        (out / Path(ignored).relative_to("web")).unlink(missing_ok=True)
    for folder in sorted((path for path in out.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def _archive(folder: Path) -> Path:
    """Write `folder` to `folder`.tar.gz: sorted names, no times, no owners, no modes of this machine."""
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=0, fileobj=file) as zipped,
        tarfile.open(mode="w", fileobj=zipped, format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            data = path.read_bytes()
            member = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


if __name__ == "__main__":
    main()
