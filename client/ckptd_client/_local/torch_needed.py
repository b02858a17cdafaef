"""Imported before anything that needs torch: one that is missing, or too old, is said in plain words."""

import sys

OLDEST = (2, 6)

_HINT = "pip install 'torch>={}.{}', or start the python that has it".format(*OLDEST)


def check() -> None:
    """Raises ImportError, with what to type, unless torch can be imported and is new enough."""
    wanted = f"ckptd_client needs torch {OLDEST[0]}.{OLDEST[1]} or newer"
    try:
        import torch  # noqa: PLC0415 - whether it is there is the question
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
