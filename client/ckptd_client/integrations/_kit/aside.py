"""Work of a trainer's that takes no part in its training: one thing at a time, in a thread."""

import threading
from collections.abc import Callable


class Aside:
    """To delete files takes as long as to write them."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> bool:
        """Whether a thread does it; False while it still does the last one."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = threading.Thread(target=task, name="ckptd-aside", daemon=True)
        self._thread.start()
        return True

    def join(self) -> None:
        """Blocks until it has nothing to do."""
        if self._thread is not None:
            self._thread.join()
