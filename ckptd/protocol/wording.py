"""What errors say of values that come from a file. Never their whole repr: it may be longer than any memory. Pure."""

_MAX_CHARS = 80
_MAX_BITS = 256


def shown(value: object, most: int = _MAX_CHARS) -> str:
    """A short text for any value: of plain ones what they are, cut off; of others their kind alone."""
    if type(value) in (str, bytes):
        text = repr(value[:most])  # type: ignore[index]
        return text if len(value) <= most else f"{text}.."  # type: ignore[arg-type]
    if type(value) is int:
        return str(value) if value.bit_length() <= _MAX_BITS else f"a number of {value.bit_length()} bits"
    return repr(value) if value is None or type(value) in (bool, float) else f"a {type(value).__name__}"


def cut(error: object, most: int = 300) -> str:
    """What an error of a library's says, cut off. To be used where its text is known to be short enough to be made."""
    text = str(error)
    return text if len(text) <= most else f"{text[:most]}.."


def told(error: BaseException) -> str:
    """An error's kind and what it says, cut off."""
    return f"{type(error).__name__}: {cut(error)}"
