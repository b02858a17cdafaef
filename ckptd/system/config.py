"""The settings of this daemon: defaults < TOML < CKPTD_* variables < flags."""

import enum
import os
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from ckptd.shared.base.errors import ConfigError
from ckptd.shared.base.refusals import Origin, flag, not_allowed, toml, variable
from ckptd.shared.files.paths import is_url, resolved, resolved_location
from ckptd.shared.settings.config import Config, default_arena
from ckptd.shared.settings.variables import FOREIGN_VARIABLES, PREFIX, check_variables, nearest
from ckptd.system.units import parse_duration_s, parse_size

SYSTEM_TOML = "/etc/ckptd/config.toml"
__all__ = ["FOREIGN_VARIABLES", "PREFIX", "SETTINGS", "Config", "Setting", "default_arena", "load_config"]
Raw = str | int | float | bool | None


class Setting:
    """One field of Config as the outside sees it."""

    def __init__(self, name: str, hint: Any) -> None:
        self.name = name
        self.hint = hint
        self._metas: list[Meta] = [meta for meta in hint.__metadata__ if isinstance(meta, Meta)]
        self._type = get_args(hint)[0]
        self._extra = next((meta.extra for meta in self._metas if meta.extra), {})
        self.kind = self._find_kind()

    @property
    def key(self) -> str:
        """TOML key."""
        return self.name

    @property
    def variable(self) -> str:
        """Environment variable."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """One phrase that says what the setting does."""
        return next((meta.description for meta in self._metas if meta.description), "")

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        words = {
            "size": 'bytes, or a number with K, M, G or T such as "64G"',
            "duration": 'seconds, or a duration such as "90s", "30m" or "24h"',
            "integer": "a whole number",
            "switch": "true or false",
            "choice": "one of " + ", ".join(str(choice) for choice in self.choices),
            "path": "a path of fewer than 1024 characters, none of them a control character",
            "text": str(self._extra.get("allowed")),
        }[self.kind]
        return words + "".join(self._bounds())

    @property
    def example(self) -> str | int | bool:
        """A value that is allowed: the default, where it can be typed."""
        if "such_as" in self._extra:
            return str(self._extra["such_as"])
        default = getattr(Config(), self.name)
        if self.kind == "path":
            return str(default or f"/path/of/{self.name}")
        return f"{default:g}s" if self.kind == "duration" else default

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a choice, empty for other kinds."""
        named = isinstance(self._type, type) and issubclass(self._type, enum.Enum)
        return tuple(map(str, self._type if named else get_args(self._type))) if self.kind == "choice" else ()

    def parse(self, raw: Raw) -> Any:
        """The typed value. Raises ValueError when it is not allowed."""
        value: Any = raw
        if isinstance(raw, str):
            value = self._from_text(raw.strip())
        elif self.kind == "duration" and isinstance(raw, int) and not isinstance(raw, bool):
            value = float(raw)
        try:
            return msgspec.convert(value, self.hint)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error

    def _from_text(self, text: str) -> Any:
        match self.kind:
            case "size":
                return parse_size(text.removesuffix("/s"))
            case "duration":
                return parse_duration_s(text)
            case "integer":
                return int(text)
            case "switch":
                return _parse_switch(text)
            case "path":
                return text or None
            case "text":
                return text
            case _:
                return text.lower()

    def _find_kind(self) -> str:
        if "kind" in self._extra:
            return str(self._extra["kind"])
        if self._type is bool:
            return "switch"
        if self._type is int:
            return "integer"
        return "path" if type(None) in get_args(self._type) or self._type is str else "choice"

    def _bounds(self) -> Iterable[str]:
        for meta in self._metas:
            if meta.gt is not None:
                yield f", above {meta.gt}"
            if meta.ge is not None:
                yield f", at least {meta.ge}"
            if meta.le is not None:
                yield f", at most {meta.le}"


SETTINGS = {name: Setting(name, hint) for name, hint in get_type_hints(Config, include_extras=True).items()}


def load_config(
    flags: Mapping[str, Raw], environ: Mapping[str, str] = os.environ, toml_path: str | None = None
) -> tuple[Config, dict[str, str]]:
    """The merged Config and, for each field, where its value came from.

    flags: by field name; None means "not given". toml_path: None searches the default places.
    Raises ConfigError naming the key, the value, its origin and what is allowed.
    """
    path = toml_path or default_toml_path(environ)
    layers: list[tuple[str, dict[str, Raw]]] = []
    if path is not None:
        layers.append((path, _checked_names(read_toml(path), path, {name: name for name in SETTINGS})))
    layers.append(("environment", _from_environ(environ)))
    given = {name.replace("-", "_"): value for name, value in flags.items() if value is not None}
    layers.append(("flags", _checked_names(given, "flags", {name: name for name in SETTINGS})))
    values: dict[str, Any] = {}
    sources = dict.fromkeys(SETTINGS, "default")
    for origin, layer in layers:
        for name, raw in layer.items():
            sources[name] = _origin(origin, SETTINGS[name])
            values[name] = parsed(SETTINGS[name], raw, sources[name])
    config = Config(**values)
    scheme, size = config.redundancy, config.set_size
    if size > scheme.max_set_size:
        text = f"set_size = {size} (from {sources['set_size']}) is too large for redundancy = {scheme}"
        hint = f"at most {scheme.max_set_size} nodes to a set, or redundancy = {scheme.for_sets_of(size)}"
        raise ConfigError(text, hint=hint)
    return config, sources


def default_toml_path(environ: Mapping[str, str]) -> str | None:
    """$CKPTD_CONFIG, else the user's file, else the machine's, the latter two only if they exist."""
    if environ.get("CKPTD_CONFIG"):
        return environ["CKPTD_CONFIG"]
    home = environ.get("HOME") or os.path.expanduser("~")
    candidates = (os.path.join(home, ".config/ckptd/config.toml"), SYSTEM_TOML)
    return next((path for path in candidates if os.path.isfile(path)), None)


_TOML_HINT = 'a setting a line, such as: slots_per_rank = 3; texts in quotes, such as: arena = "/dev/shm/me"'


def read_toml(path: str) -> dict[str, Raw]:
    """The file's top-level keys. Raises ConfigError when it cannot be read or is not TOML."""
    try:
        with open(resolved(path), "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="fix --config or CKPTD_CONFIG") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", hint=_TOML_HINT) from None


def _from_environ(environ: Mapping[str, str]) -> dict[str, Raw]:
    """Our variables by field name. An empty one counts as not set, as after `CKPTD_STORE= command`."""
    check_variables(environ)
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in FOREIGN_VARIABLES}
    return _checked_names(ours, "environment", {setting.variable: name for name, setting in SETTINGS.items()})


def _checked_names(raw: Mapping[str, Raw], origin: str, known: Mapping[str, str]) -> dict[str, Raw]:
    """Values by field name. Raises ConfigError for the first name that is not known, with the nearest that is."""
    for name in raw:
        if name not in known:
            raise ConfigError(f"unknown setting {name} in {origin}", hint=nearest(name, known))
    return {known[name]: value for name, value in raw.items() if value != "" or origin != "environment"}


def _origin(layer: str, setting: Setting) -> str:
    return {"environment": setting.variable, "flags": setting.flag}.get(layer, layer)


def parsed(setting: Setting, raw: Raw, origin: str) -> Any:
    """The typed value. origin: the setting's variable, its flag, or a file. Raises ConfigError."""
    where, path = _place(setting, origin), raw
    if setting.kind == "path" and isinstance(raw, str) and raw.strip():
        in_file = origin not in {setting.variable, setting.flag}
        if not _starts_somewhere(raw.strip()) and (in_file or resolved(".") == "/"):
            why = "a file is read from any directory" if in_file else "the working directory is /, as a unit's"
            must = f"an absolute path, or one that begins with ~/: {why}"
            raise not_allowed(ConfigError, setting.name, raw, must, setting.example, origin=where)
        path = resolved_location(raw.strip())
    try:
        return setting.parse(path)
    except ValueError:
        raise not_allowed(ConfigError, setting.name, raw, setting.allowed, setting.example, origin=where) from None


def _starts_somewhere(path: str) -> bool:
    """Whether it means the same from each working directory."""
    return path.startswith(("/", "~")) or is_url(path)


def _place(setting: Setting, origin: str) -> Origin:
    known = {setting.variable: variable, setting.flag: flag}
    return known.get(origin, toml)(origin)


def _parse_switch(text: str) -> bool:
    switches = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in switches:
        raise ValueError(f"{text!r} is neither true nor false")
    return switches[text.lower()]
