"""A daemon behind a relay: it tells its peers the relay's ports for its own, and its own to the relay, by files.

python relayed.py CONTROL_PORT BULK_PORT PREFIX run ...
"""

import os
import sys
from typing import Any

from ckptd.cli import main
from ckptd.peers import plane

_control, _bulk = map(int, sys.argv[1:3])
_prefix = sys.argv[3]
sys.argv[1:4] = []
_listen = plane.listen
_offer = plane.PeerPlane.offer_bulk


def _note(name: str, port: int) -> None:
    with open(f"{_prefix}{name}.new", "w", encoding="ascii") as file:
        file.write(str(port))
    os.replace(f"{_prefix}{name}.new", f"{_prefix}{name}")


def _relayed_listen(*args: Any) -> tuple[Any, str]:
    made, endpoint = _listen(*args)
    _note("control", int(endpoint.rpartition(":")[2]))
    return made, f"tcp://127.0.0.1:{_control}"


def _relayed_offer(self: plane.PeerPlane, port: int) -> None:
    _note("bulk", port)
    _offer(self, _bulk)


plane.listen = _relayed_listen
plane.PeerPlane.offer_bulk = _relayed_offer  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
