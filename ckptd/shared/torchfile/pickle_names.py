"""Whether a pickle names only what pickles of ours name: found by reading its opcodes, none of which is carried out."""

import io
import pickletools

from ckptd.shared.torchfile.pickling import ALLOWED

# The other ways of a pickle to name what it does not hold.
_NAMING = frozenset({"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"})


def stranger_in(data: bytes) -> str:
    """What a `.metadata` has that no such file of ours has, empty when nothing: found without unpickling any of it.

    Our pickles name each class and function by the one opcode GLOBAL, and those that torch's readers must find are few.
    """
    try:
        for code, argument, at in pickletools.genops(io.BytesIO(data)):
            if code.name == "GLOBAL" and tuple(str(argument).split(" ", 1)) not in ALLOWED:
                return f"names {str(argument)[:80]!r} at byte {at}"
            if code.name in _NAMING:
                return f"has the opcode {code.name} at byte {at}"
            if code.name == "STOP":
                return "" if at == len(data) - 1 else f"goes on after its end at byte {at}"
    except (ValueError, IndexError, OverflowError, MemoryError) as error:
        return f"is no pickle: {str(error)[:80]}"
    return "has no end"
