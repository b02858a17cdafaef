"""The `.metadata` of torch.distributed.checkpoint, a pickle: read as inert records, or only looked through. Pure."""

import io
import pickletools
import re
from typing import Any

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.wording import cut, shown
from ckptd.shared.torchfile.pickle_read import MALFORMED, Global, Machine, Made
from ckptd.shared.torchfile.pickling import ALLOWED, DCP_FILESYSTEM, DCP_METADATA

# The ways of a pickle to name what it does not hold, but for GLOBAL.
_NAMING = frozenset({"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"})


def read_metadata(data: bytes, *, where: str) -> Made:
    """The Metadata record in a `.metadata` of torch.distributed.checkpoint. Raises DamagedError, naming where.

    Its classes are Made, of their names without their modules, and have a state; its dtypes are Globals. It may name
    only what such a file needs.
    """
    text = f"{where} is no metadata of torch.distributed.checkpoint"
    try:
        found = _Metadata().run(data)
    except MALFORMED as error:
        hint = "do not open it with dcp.load, which would run what it holds"
        raise DamagedError(f"{text}: {cut(error)}", hint=hint) from None
    if type(found) is not Made or found.of != "Metadata" or type(found.state) is not dict:
        raise DamagedError(f"{text}: it holds something else")
    return found


def stranger_in(data: bytes) -> str:
    """What a `.metadata` has that no such file of ours has, empty when nothing: found without running any of it.

    Our pickles name each class and function by the one opcode GLOBAL, and those that torch's readers must find are few.
    """
    try:
        for code, argument, at in pickletools.genops(io.BytesIO(data)):
            if code.name == "GLOBAL" and tuple(str(argument).split(" ", 1)) not in ALLOWED:
                return f"names {shown(str(argument))} at byte {at}"
            if code.name in _NAMING:
                return f"has the opcode {code.name} at byte {at}"
            if code.name == "STOP":
                return "" if at == len(data) - 1 else f"goes on after its end at byte {at}"
    except (ValueError, IndexError, OverflowError, MemoryError) as error:
        return f"is no pickle: {str(error)[:80]}"
    return "has no end"


class _Metadata(Machine):
    """Of a `.metadata`: what it names is on a list, and what it calls makes a record."""

    refused = frozenset({
        "INST", "OBJ", "NEWOBJ_EX", "PERSID", "BINPERSID", "EMPTY_SET", "FROZENSET", "ADDITEMS",
    })  # fmt: skip
    lax = False

    def named(self, name: str) -> None:
        """Raises ValueError for what such a file does not need."""
        module, _, member = name.partition(" ")
        if (module, member) not in _KNOWN and not (module == "torch" and _DTYPE_RE.fullmatch(member)):
            text = f"it wants {shown(module)}, {shown(member)}, which is not on the list of what DCP's metadata needs"
            raise ValueError(text)
        self.stack.append(Global(f"{module}.{member}"))

    def stack_global(self, _: None) -> None:
        """As named."""
        module, member = self.last(2)
        self.named(f"{module} {member}" if type(module) is type(member) is str else "")

    def call(self, _: None) -> None:
        """A class without arguments, a size, or a call whose result no reader needs."""
        function, args = self.last(2)
        name = function.name if type(function) is Global else ""
        if name in _RECORDS and args == ():
            self.stack.append(Made(Global(name.rpartition(".")[2]), ()))
        elif name in _IGNORED or (name == _MEMBER and _names_a_member(args)):
            self.stack.append(None)
        elif name == "torch.Size" and type(args) is tuple and len(args) == 1 and type(args[0]) in (tuple, list):
            self.stack.append(tuple(args[0]))
        else:
            raise ValueError("it calls what is no function of DCP's metadata")

    def build(self, _: None) -> None:
        """Of a record."""
        (state,) = self.last(1)
        if type(self.stack[-1]) is not Made:
            raise ValueError("it sets the state of what is no record")
        self.stack[-1].state = state

    def update(self, items: list[Any]) -> None:
        """Only keys whose hash takes no time, and is no other's: that of nested tuples can take for ever."""
        made = self.stack[-1]
        if type(made) is not dict or not all(type(key) in (str, Made) for key in items[::2]):
            raise ValueError("it has a key that is none")
        made.update(zip(items[::2], items[1::2], strict=True))


_RECORDS = {
    f"{DCP_METADATA}.{name}"
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta",
    )
} | {f"{DCP_FILESYSTEM}._StorageInfo"}  # fmt: skip
_IGNORED = {
    "torch.serialization._get_layout", f"{DCP_METADATA}._MEM_FORMAT_ENCODING", "pathlib.PosixPath",
    "pathlib.PurePosixPath", "pathlib.Path", "pathlib._local.PosixPath", "pathlib._local.PurePosixPath",
}  # fmt: skip
_MEMBER = "builtins.getattr"  # by which some versions of Python name a member of an enumeration
_KNOWN = {tuple(name.rsplit(".", 1)) for name in (*_RECORDS, *_IGNORED, _MEMBER, "torch.Size")}
_DTYPE_RE = re.compile(r"bool|(bfloat|bits|complex|float|q?u?int)\w+")


def _names_a_member(args: Any) -> bool:
    match args:
        case (Global(name), str()):
            return name in _IGNORED
    return False
