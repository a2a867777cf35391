"""What this library needs of vLLM and TRL, and whether the installed releases have it.

The library uses and patches code of vLLM and TRL that is not a public interface. `compat.toml` lists these
places. This module looks for each place in the installed sources, without importing them. It is an error if
a required feature lacks a place. If an optional feature lacks a place, the feature is switched off, with a
warning. (There is no warning if the release was tested and is older than the feature.) An untested release
causes a warning, even if it has all places. DELTA_WEIGHT_SYNC_STRICT=1 turns warnings into errors.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from delta_weight_sync.errors import CompatibilityError

STRICT: Final = "DELTA_WEIGHT_SYNC_STRICT"
_PLACE: Final = re.compile(r"([\w.]+)(?:\(([\w, ]*)\)| with ([\w ]+))?")
_log = logging.getLogger("delta_weight_sync")

Place = tuple[str, str, str]
"""A file of the package, what must be in it, and why."""


@dataclass(frozen=True)
class Feature:
    """A feature and the places that it needs. `without`: what happens without it; empty if it is required."""

    what: str
    places: list[Place]
    missing: list[Place]
    without: str = ""
    since: str = ""  # the first release that has all places
    upstream: str = ""  # proposed changes in upstream/ that would make these places unnecessary


@dataclass(frozen=True)
class Release:
    """An installed release of vLLM or TRL, and what was found in it."""

    package: str  # name of the installed distribution
    version: str  # "" if it is not installed
    run: list[str]  # releases that were tested with this library, oldest first
    features: dict[str, Feature] = field(default_factory=dict)  # by name; only those that apply to this build

    @property
    def known(self) -> bool:
        """Whether this release was tested with this library."""
        return any(f"{self.version}.".startswith(f"{release}.") for release in self.run)

    def works(self, feature: str) -> bool:
        """Whether all places of a feature are there."""
        return not self.features[feature].missing

    def cure(self, since: str = "") -> str:
        """Return the command that installs a tested release, `since` or later. Of the releases that are newer
        than the installed one, the command takes the oldest. If none is newer, it takes the newest of all."""
        works = [release for release in self.run if _number(release) >= _number(since)]
        newer = (release for release in works if _number(release) > _number(self.version))
        return f"pip install '{self.package}=={next(newer, works[-1])}.*'"

    def problems(self, *needed: str) -> tuple[list[str], list[str]]:
        """Return errors and warnings about this release. Optional features in `needed` count as required."""
        fatal, warnings = list[str](), list[str]()
        if not self.version:
            fatal.append(f"{self.package} is not installed; pip install '.[{self.package}]' in the checkout")
        elif not self.known:
            warnings.append(f"{self.package} {self.version} was not tested with this library; {self.cure()}")
        for name, feature in self.features.items():
            for file, what, why in feature.missing[:1]:
                text = (
                    f"{self.package} {self.version} has no {what} in {file}, needed for {feature.what}"
                    f" ({why}); {self.cure(feature.since)}"
                )
                if not feature.without or name in needed:
                    fatal.append(text)
                # A tested release from before `since` is known to lack the feature, so do not warn.
                elif not (self.known and _number(self.version) < _number(feature.since)):
                    warnings.append(f"{text}; until then {feature.without}")
        return (fatal + warnings, []) if is_set(STRICT) else (fatal, warnings)


@functools.cache
def examine(package: str, site: Path | None = None) -> Release:
    """Look for all places in the installed release of `package` ("vllm" or "trl"), or in the release in
    folder `site`, such as an unpacked wheel. If there is no release, the version of the result is ""."""
    needs = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())[package]
    spec = importlib.util.find_spec(package)
    folder = site / package if site else Path(spec.origin or "").parent if spec else Path()
    path = [str(site)] if site else sys.path
    names = needs["distributions"]
    found = [each for name in names for each in importlib.metadata.distributions(name=name, path=path)]
    if not (found and folder.is_dir()):
        return Release(package, "", needs["run"])
    name, version, features = found[0].name, found[0].version, dict[str, Feature]()
    for feature, fields in needs["features"].items():
        if fields.pop("on", "") in f"{name} {version}":  # `on = "cpu"`: only CPU builds need it
            missing = [place for place in fields["places"] if not _has(folder / place[0], place[1])]
            features[feature] = Feature(missing=missing, **fields)
    return Release(name, version, needs["run"], features)


def require(package: str, *needed: str) -> Release:
    """The installed release of `package`. The main process logs the warnings of `problems`.

    Raises `CompatibilityError` if there is no release, or if it lacks a required feature or one in `needed`.
    """
    release = examine(package)
    fatal, warnings = release.problems(*needed)
    if fatal:
        raise CompatibilityError(fatal[0])
    if warnings and multiprocessing.parent_process() is None:  # else vLLM's children would repeat it
        _log.warning("%s. `delta-weight-sync doctor` lists all places", ". ".join(warnings))
    return release


def is_set(variable: str) -> bool:
    """Whether an environment variable is on."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no", "off")


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _has(file: Path, what: str) -> bool:
    """Whether a source file has a place, written as in `compat.toml`."""
    place = _PLACE.fullmatch(what)
    assert place, what
    path, parameters, names = place.groups()
    found: list[ast.AST] = [_parsed(file)]
    for name in path.split("."):
        found = [inner for node in found for inner in _named(node, name)]
    if parameters is None:
        return any({*(names or "").split()} <= {*_names(node)} for node in found)
    arguments = [node.args for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    wanted = re.findall(r"\w+", parameters)
    return any([a.arg for a in (*each.args, *each.kwonlyargs)] == wanted for each in arguments)


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text() if file.is_file() else "")


def _named(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield what has `name` in a module or class: a definition, import, variable, or attribute of `self`."""
    inner = list(ast.iter_child_nodes(scope))
    while inner:
        node = inner.pop()
        if name in (getattr(node, "name", ""), getattr(node, "asname", "")) or (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
        ):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == name)
            yield from (n for n in stored if isinstance(n.ctx, ast.Store) and isinstance(scope, ast.ClassDef))
        elif not isinstance(node, ast.ClassDef):
            inner.extend(ast.iter_child_nodes(node))


def _names(node: ast.AST) -> Iterator[str]:
    """All names of variables, attributes and parameters in `node`."""
    for inner in ast.walk(node):
        yield getattr(inner, "id", getattr(inner, "attr", getattr(inner, "arg", ""))) or ""
