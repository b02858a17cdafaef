"""The way to a framework that may not be installed, or be older than what an integration was made for."""

import functools
import importlib
import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any

from ckptd.shared.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class Framework:
    """One that an integration is for. distribution: what pip calls it. oldest: the first release that will do."""

    name: str
    distribution: str
    oldest: str

    def module(self, name: str) -> Any:
        """A module of the framework, imported. Raises UsageError, with what to install, when it cannot be had."""
        return _module(self, name)

    def base(self, module: str, name: str) -> Any:
        """A class of the framework to derive from; where it cannot be had, one whose making raises UsageError.

        So a module that derives from it can be imported without the framework.
        """
        try:
            return getattr(self.module(module), name)
        except UsageError as error:
            return _missing(error)

    def problem(self) -> str:
        """What keeps it from being used; empty when nothing does."""
        try:
            found = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.name} is not installed"
        if _release(found) < _release(self.oldest):
            return f"{self.name} {found} is too old: {self.oldest} or newer is needed"
        return ""

    def refusal(self, problem: str) -> UsageError:
        """The error that says so, and what to install."""
        return UsageError(problem, hint=f"pip install '{self.distribution}>={self.oldest}'")


@functools.cache  # 7 ms to look up a version, and a save asks for several modules
def _module(framework: Framework, name: str) -> Any:
    problem = framework.problem()
    if problem:
        raise framework.refusal(problem)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise framework.refusal(f"{name} cannot be imported: {error}") from error


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (0, 15) for 0.15.0rc1 too, since what is missing counts as zero."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    release = [int(number) for number in numbers[0].split(".")] if numbers else []
    while release and not release[-1]:
        release.pop()
    return tuple(release)


def _missing(error: UsageError) -> type:
    class Missing:
        """Stands for a class that is not there."""

        def __new__(cls, *_args: Any, **_options: Any) -> Any:
            raise UsageError(error.message, hint=error.hint)

    return Missing
