"""Whether the installed releases of other packages have the private code that this library uses.

The library calls and replaces code of vLLM, TRL and huggingface_hub that is not a public interface. The
modules `hooks` of `vllm`, `trl` and `store` declare each use as a `Feature`. Its probe, a function, imports
the code and looks at its signatures. Each patch asks its feature before it replaces anything.

It is an error if a required feature lacks code. If an optional feature lacks code, the feature is switched
off, with a warning. (There is no warning if the release was tested and is older than the feature.) There is
also a warning if the release of vLLM or TRL was not tested. DELTA_WEIGHT_SYNC_STRICT=1 turns warnings into
errors.
"""

import dis
import functools
import importlib
import importlib.metadata
import inspect
import logging
import multiprocessing
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from delta_weight_sync.errors import CompatibilityError

STRICT: Final = "DELTA_WEIGHT_SYNC_STRICT"
_log = logging.getLogger("delta_weight_sync")


class Release(NamedTuple):
    """An installed release; `version` is "" if the package is not installed."""

    name: str
    version: str


@dataclass(frozen=True)
class Package:
    """A package whose private code the library uses."""

    names: tuple[str, ...]  # under which it may be installed
    tested: tuple[str, ...]  # releases that passed the tests, oldest first
    extra: str = ""  # the extra of this library that installs the package; empty: each installation does

    def knows(self, version: str) -> bool:
        """Whether a version is of a release that was tested with this library."""
        return any(f"{version}.".startswith(f"{release}.") for release in self.tested)

    def cure(self, since: str = "") -> str:
        """Return the command that installs a tested release, `since` or later. Of the releases that are newer
        than the installed one, the command takes the oldest. If none is newer, it takes the newest of all."""
        name, version = installed(self)
        if not version:
            extra = f"[{self.extra}]" if self.extra else ""
            return f"pip install '.{extra}' in the checkout"
        works = [release for release in self.tested if _number(release) >= _number(since)]
        newer = (release for release in works if _number(release) > _number(version))
        return f"pip install '{name}=={next(newer, works[-1])}.*'"


class Probe:
    """Looks for code and notes what is missing. A module that cannot be imported lacks everything."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def find(self, module: str, name: str) -> Any:
        """Return what a module has under a name, such as "Class.method"; None if it is missing."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a doctor need not hear that TRL's trainer is experimental
                found: Any = importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - some modules look for devices and libraries
            reason = (str(error).splitlines() or [""])[0]
            self._note(f"module {module} that can be imported ({type(error).__name__}: {reason})")
            return None
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            self._note(f"{name} in {module}")
        return found

    def attributes(self, module: str, name: str, *attributes: str) -> None:
        """Look for attributes of a class's objects: declared by the class, or set by one of its methods."""
        found = self.find(module, name)
        owners = getattr(found, "__mro__", ())
        for attribute in attributes:
            if found is not None and not any(_declares(owner, attribute) for owner in owners):
                self._note(f"{name}.{attribute} in {module}")

    def accepts(self, module: str, name: str, *parameters: str) -> None:
        """Look for a function that has these parameters, because the library passes them by name."""
        found = self.find(module, name)
        if found is not None and not {*parameters} <= {*_parameters(found)}:
            self._note(f"{name} with {' '.join(parameters)} in {module}")

    def exactly(self, module: str, name: str, *parameters: str) -> None:
        """Look for a function with just these parameters, because the library replaces the function or passes
        them by position."""
        found = self.find(module, name)
        if found is not None and _parameters(found) != [*parameters]:
            self._note(f"{name}({', '.join(parameters)}) in {module}")

    def calls(self, module: str, name: str, method: str) -> None:
        """Look for a function that uses a method of its object, because the library overrides the method."""
        found = self.find(module, name)
        if found is not None and method not in _names(found, "LOAD_ATTR", "LOAD_METHOD"):
            self._note(f"{name} with {method} in {module}")

    def _note(self, what: str) -> None:
        if what not in self.missing:  # for a missing module, each question would note the same
            self.missing.append(what)


@dataclass(frozen=True)
class Feature:
    """A use of a package's private code."""

    package: Package
    what: str  # the feature, in words
    probe: Callable[[Probe], None]
    without: str = ""  # what happens without the feature; empty if it is required
    since: str = ""  # the first release that has all of the code
    upstream: str = ""  # changes in upstream/ that would make the use unnecessary
    only_cpu: bool = False  # whether only CPU builds need the feature

    def applies(self) -> bool:
        """Whether this build of the package is one that needs the feature."""
        return not self.only_cpu or "cpu" in " ".join(installed(self.package))

    def missing(self) -> tuple[str, ...]:
        """Return the code that the installed release lacks."""
        return _missing(self)

    def works(self) -> bool:
        """Whether this build needs the feature and has all of its code."""
        return self.applies() and not self.missing()

    def problem(self) -> str:
        """Return what is missing, and the fix; "" if nothing is missing."""
        name, version = installed(self.package)
        cure = self.package.cure(self.since)
        if not version:
            return f"{name} is not installed: {cure}"
        if not (missing := self.missing()):
            return ""
        return f"{name} {version} has no {missing[0]}, needed for {self.what}: {cure}"

    def require(self) -> None:
        """Raise `CompatibilityError` if code is missing."""
        if problem := self.problem():
            raise CompatibilityError(problem)

    @contextmanager
    def imports(self) -> Iterator[None]:
        """For a block that imports the code: raise `CompatibilityError` before it if code is missing."""
        self.require()
        yield


def require(features: Sequence[Feature], *needed: Feature) -> None:
    """Check all features of a package. The main process logs the warnings.

    Raises `CompatibilityError` if the package is not installed, or if it lacks code of a required feature or
    of one in `needed`.
    """
    package = features[0].package
    name, version = installed(package)
    known = package.knows(version)
    said = list[str]()
    if version and not known:
        said.append(f"{name} {version} was not tested with this library: {package.cure()}")
    for feature in filter(Feature.applies, features):
        if not feature.without or feature in needed:
            feature.require()
        # A tested release from before `since` is known to lack the feature, so do not warn.
        elif (problem := feature.problem()) and not (known and _number(version) < _number(feature.since)):
            said.append(f"{problem}; until then {feature.without}")
    if said and is_set(STRICT):
        raise CompatibilityError(said[0])
    if multiprocessing.parent_process() is None:  # else vLLM's children would repeat it
        for warning in said:
            _log.warning("%s. `delta-weight-sync doctor` lists all features", warning)


@functools.cache
def installed(package: Package) -> Release:
    """Return the installed release of a package."""
    for name in package.names:
        for found in importlib.metadata.distributions(name=name):
            return Release(name, found.version)
    return Release(package.names[0], "")


def is_set(variable: str) -> bool:
    """Whether an environment variable is on."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no", "off")


@functools.cache  # also because later the library's own code would be found, in place of what it replaced
def _missing(feature: Feature) -> tuple[str, ...]:
    probe = Probe()
    feature.probe(probe)
    return tuple(probe.missing)


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _parameters(function: Any) -> list[str]:
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # what has this name now is no function, or is compiled
        return []
    return [each.name for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _declares(owner: type, attribute: str) -> bool:
    """Whether a class has an attribute, annotates it, or sets it in one of its methods."""
    if attribute in vars(owner) or attribute in inspect.get_annotations(owner):
        return True
    return any(attribute in _names(each, "STORE_ATTR", of="self") for each in vars(owner).values())


def _names(function: Any, *kinds: str, of: str = "") -> set[str]:
    """The attributes' names in a function's instructions of some kinds, such as those that set an attribute.
    `of`: take only attributes of the variable with this name."""
    plain = inspect.unwrap(function)
    if not inspect.isfunction(plain):
        return set()
    names = set[str]()
    variable = ""  # what the instruction before loaded
    for step in dis.get_instructions(plain):
        if step.opname in kinds and of in ("", variable):
            names.add(step.argval)
        # Newer Pythons load two variables by one instruction, whose text is then "first, second".
        variable = step.argrepr.split(", ")[-1] if step.opname.startswith("LOAD_") else ""
    return names
