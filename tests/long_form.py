"""The two forms of the tests: `make test` runs the short one, `make faults` the long one, which has more cases."""

import os
from typing import Any

LONG = os.environ.get("FAULTS") == "long"


def in_long(*cases: Any) -> tuple[Any, ...]:
    """The cases, in the long form alone."""
    return cases if LONG else ()
