"""The command doctor: shows what works in this environment, and how to make the rest work."""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from delta_weight_sync import compat
from delta_weight_sync.sglang import hooks as sglang_hooks
from delta_weight_sync.store import hooks as store_hooks
from delta_weight_sync.trl import hooks as trl_hooks
from delta_weight_sync.vllm import hooks as vllm_hooks

_NAME = "delta-weight-sync"
_PATCHED = vllm_hooks.FEATURES, trl_hooks.FEATURES, sglang_hooks.FEATURES


def configure(parser: argparse.ArgumentParser, _: str) -> None:
    """Add the arguments of `doctor`."""
    help_ = "examine vLLM, TRL or SGLang in FOLDER, such as an unpacked wheel, not the installed ones"
    parser.add_argument("--site", type=Path, metavar="FOLDER", help=help_)
    parser.epilog = "The exit code is 1 if a package that was found cannot be used."
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    print(f"{_NAME} {importlib.metadata.version(_NAME)}, Python {platform.python_version()}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reports on this machine when it is imported
    if arguments.site:
        sys.path.insert(0, str(arguments.site))  # what it lacks, such as PyTorch, comes from this environment
        inside = {each.name for each in importlib.metadata.distributions(path=[str(arguments.site)])}
        # A folder of --site usually holds only one of the packages.
        found = [each for each in _PATCHED if inside & {*each[0].package.names}] or [*_PATCHED]
        wrong = False
    else:
        found = [store_hooks.FEATURES, *_PATCHED]
        wrong = _packages()
    sys.exit(int(any([wrong, *map(_release, found)])))


def _packages() -> bool:
    """Print a line for each requirement but engines and TRL. Return whether an installed version is wrong."""
    wrong = False
    own = importlib.metadata.distribution(_NAME)
    seen = {"vllm", "trl", "sglang"}
    group = ""
    extras = ("", *(own.metadata.get_all("Provides-Extra") or ()))
    for need in map(Requirement, own.requires or ()):
        extra = next(e for e in extras if not need.marker or need.marker.evaluate({"extra": e}))
        if need.name in seen:  # several extras may need the same package
            continue
        seen.add(need.name)
        if extra != group:
            print(f"with the extra {extra}, also:")
            group = extra
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


def _release(features: Sequence[compat.Feature]) -> bool:
    """Print a line for each feature of a package. Return whether the package is installed, but unusable."""
    package = features[0].package
    wrong = False
    name, version = compat.installed(package)
    if not version:
        print(features[0].problem())
        return False
    print(f"{name} {version} {'was' if package.knows(version) else 'was not'} tested with this library")
    for feature in filter(compat.Feature.applies, features):
        if not (missing := feature.missing()):
            print(f"  {'ok':8} {feature.what}")
            continue
        wrong |= not feature.without
        consequence = f": {feature.without}" if feature.without else ""
        print(f"  {'off' if feature.without else 'error':8} {feature.what}{consequence}")
        for place in missing:
            print(f"           missing {place}")
        upstream = f"; or apply the patch upstream/{feature.upstream}" if feature.upstream else ""
        print(f"           cure: {package.cure(feature.since)}{upstream}")
    return wrong
