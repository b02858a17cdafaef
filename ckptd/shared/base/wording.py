"""What messages say of values. Of those from a file never their whole repr: it may be longer than any memory. Pure."""

from collections.abc import Iterable

_MAX_CHARS = 80
_MAX_BITS = 256
_MAX_RUNS = 8


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


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of numbers, in order."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Numbers with runs drawn together: "0-14, 16"."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers))


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks for a sentence, with runs drawn together: "rank 3", "ranks 1, 3-5"; of many the first."""
    numbers = sorted(ranks)
    shown = ranges(numbers).split(", ")
    more = f", ... ({len(numbers)} in all)" if len(shown) > _MAX_RUNS else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(shown[:_MAX_RUNS])}{more}"
