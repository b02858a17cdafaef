"""Names of manifests, which have their digests: COMMITTED selects one of them, and none is ever replaced. Pure."""

import re
from collections.abc import Iterable

from ckptd.shared.format.manifest import COMMITTED

_MANIFEST_RE = re.compile(r"^ckptd\.[0-9a-f]{16}\.manifest\Z")
_INDEX_RE = re.compile(r"^ckptd\.[0-9a-f]{16}\.index\Z")


def manifest_name(file_digest: bytes) -> str:
    """Of the manifest whose whole file has this digest."""
    return f"ckptd.{file_digest.hex()[:16]}.manifest"


def is_manifest(name: str) -> bool:
    """Whether a file of a checkpoint has the name of a manifest."""
    return _MANIFEST_RE.match(name) is not None


def is_index(name: str) -> bool:
    """Whether a file of a checkpoint has the name of an index of records."""
    return _INDEX_RE.match(name) is not None


def has_records(names: Iterable[str]) -> bool:
    """Whether a directory with these names is a checkpoint, or was: COMMITTED or a manifest is among them."""
    return any(name == COMMITTED or is_manifest(name) for name in names)
