"""How much work a call is, in instructions of Python: the same on each machine, however busy."""

import sys
from collections.abc import Callable


def opcodes(call: Callable[[], object]) -> int:
    """Instructions that it takes; those of compiled code are not counted."""
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
