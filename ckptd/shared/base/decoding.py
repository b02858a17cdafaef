"""What decoding bytes of unknown origin may raise. Every decoder of ours makes of it an error that names the place."""

import msgspec

# A nesting of 1,000 levels is a RecursionError. A count of 2^32 items is a MemoryError where the system refuses the
# memory for it; nothing of it is touched before the bytes end.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError)
