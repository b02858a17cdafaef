"""Hints for a state that does not fit a checkpoint, from the names of both. Pure."""

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence

_SHOWN = 5
LENIENT = "add strict=False to load what both have: the notes of what it returns list the rest"


def all_of(*hints: str) -> str:
    """Joins several hints, some of which may be empty."""
    return "; or ".join(filter(None, hints))


def hint_of(missing: Sequence[str], known: Collection[str], *, converts: bool) -> str:
    """The hint. missing: names of the state, also of Statefuls, that the checkpoint lacks; known: its names.

    converts: whether load_state_dict would convert elements.
    """
    if converts:
        return "load into the dtype that was saved, such as model.float(), and convert afterwards"
    if not missing:
        return ""
    if not known:
        return "the checkpoint holds nothing"
    known = dict.fromkeys(known)
    return _nested(missing, known, known.__contains__) or _similar(missing, known)


def _nested(missing: Sequence[str], known: Iterable[str], has: Callable[[str], bool]) -> str:
    """The hint if one side has its names one level deeper."""
    for name in missing:
        top, _, rest = name.partition(".")
        if rest and has(rest) and not has(top):
            return f"the checkpoint has {rest!r} without {top!r}: try load_from(path, {top}.state_dict())"
    ends = {name.partition(".")[2]: name.partition(".")[0] for name in known if "." in name}
    top = next((ends[name] for name in missing if name in ends), "")
    return f"the checkpoint has it under {top!r}: give {{{top!r}: ...}} as the state" if top else ""


def _similar(missing: Sequence[str], known: Iterable[str]) -> str:
    """The hint with similar names and the top-level names of the checkpoint."""
    tops = list(dict.fromkeys(name.partition(".")[0] for name in known))
    meant: dict[str, str] = {}
    for name in missing:
        top = name.partition(".")[0]
        pool, wanted = (tops, top) if top not in tops else ([*known], name)
        found = difflib.get_close_matches(wanted, pool, n=1)
        if found:
            meant[wanted] = found[0]
    shown = [f"{right!r} instead of {wrong!r}" for wrong, right in list(meant.items())[:_SHOWN]]
    more = f" and {len(tops) - _SHOWN} more" if len(tops) > _SHOWN else ""
    has = f"the checkpoint has {', '.join(map(repr, tops[:_SHOWN]))}{more}"
    return f"{has}; did you mean {', '.join(shown)}?" if shown else has
