"""Imported before modules that need torch: raises a plain error if torch is missing or too old."""

import sys

OLDEST = (2, 6)

_HINT = "pip install 'torch>={}.{}', or start the python that has it".format(*OLDEST)


def check() -> None:
    """Raises ImportError with a hint unless torch can be imported and is new enough."""
    wanted = f"ckptd_client needs torch {OLDEST[0]}.{OLDEST[1]} or newer"
    try:
        import torch  # noqa: PLC0415 - this tests whether it exists
    except ImportError as error:
        raise ImportError(f"{wanted}; {sys.executable} cannot import it: {error}\n  hint: {_HINT}") from (
            None if isinstance(error, ModuleNotFoundError) and error.name == "torch" else error
        )
    found = str(getattr(torch, "__version__", "of no version"))
    numbers = found.partition("+")[0].split(".")[:2]
    if all(map(str.isdecimal, numbers)) and tuple(map(int, numbers)) < OLDEST:
        where = getattr(torch, "__file__", "")
        raise ImportError(f"{wanted}; {sys.executable} has torch {found} in {where}\n  hint: {_HINT}")


check()
