"""The command doctor: shows what works in this environment, and how to make the rest work."""

import argparse
import importlib.metadata
import platform
import sys
from pathlib import Path

from packaging.requirements import Requirement

from delta_weight_sync import compat

_NAME = "delta-weight-sync"


def configure(parser: argparse.ArgumentParser, _: str) -> None:
    """Add the arguments of `doctor`."""
    help_ = "examine vLLM and TRL in FOLDER, such as an unpacked wheel, not the installed ones"
    parser.add_argument("--site", type=Path, metavar="FOLDER", help=help_)
    parser.epilog = "The exit code is 1 if a package that was found cannot be used."
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    print(f"{_NAME} {importlib.metadata.version(_NAME)}, Python {platform.python_version()}")
    wrong = False if arguments.site else _packages()
    releases = [compat.examine(package, arguments.site) for package in ("vllm", "trl")]
    # A folder of --site usually holds only one of the packages. Do not print that it lacks the other.
    found = [each for each in releases if each.version or not arguments.site]
    sys.exit(int(any([wrong, *map(_release, found or releases)])))


def _packages() -> bool:
    """Print a line for each requirement but vLLM and TRL. Return whether an installed version is wrong."""
    wrong, own = False, importlib.metadata.distribution(_NAME)
    extras = ("", *(own.metadata.get_all("Provides-Extra") or ()))
    for need in map(Requirement, own.requires or ()):
        extra = next(e for e in extras if not need.marker or need.marker.evaluate({"extra": e}))
        if need.name in ("vllm", "trl"):
            continue
        try:
            found = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            print(f"  {'none':8} {need.name}: pip install '.[{extra}]' in the checkout")
            continue
        fits = need.specifier.contains(found, prereleases=True)
        cure = "" if fits else f": pip install '{need.name}{need.specifier}'"
        print(f"  {'ok' if fits else 'wrong':8} {need.name} {found}{cure}")
        wrong |= not fits
    return wrong


def _release(release: compat.Release) -> bool:
    """Print a line for each feature of vLLM or TRL. Return whether the package is installed, but unusable."""
    problems = release.problems()[0]
    state = "was tested with this library" if release.known else "was not tested with this library"
    print(f"{release.package} {release.version} {state}" if release.version else problems[0])
    for feature in release.features.values():
        lacks, optional = bool(feature.missing), bool(feature.without)
        word = "ok" if not lacks else "off" if optional else "error"
        print(f"  {word:8} {feature.what}{f': {feature.without}' if lacks and optional else ''}")
        for file, what, why in feature.missing or feature.places:
            print(f"           {'missing' if lacks else 'found'} {file}: {what} ({why})")
        if lacks:
            upstream = f"; or apply the patch upstream/{feature.upstream}" if feature.upstream else ""
            print(f"           cure: {release.cure(feature.since)}{upstream}")
    return bool(release.version and problems)
