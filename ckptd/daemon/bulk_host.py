"""The bulk server of a daemon: started when the first peer is met, open to peers for the jobs that both have."""

from ckptd.arena.arena import Arena
from ckptd.parity.served import open_served
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.errors import ConfigError, PeerError
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.server import BulkServer, Served


class BulkHost:
    """Owns the server. The plane says which node comes under which link, for which jobs."""

    def __init__(self, arena: Arena, plane: PeerPlane, port: int = 0) -> None:
        self._port = port
        self._arena = arena
        self._plane = plane
        self._server: BulkServer | None = None

    def open(self) -> None:
        """Serves from now on, and sends the address to peers. Raises ConfigError when the port cannot be had."""
        if self._server is None:
            host = self._plane.peer.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            try:
                self._server = BulkServer(
                    self._served, self._secret_of, host=host, port=self._port, integrity=self._arena.integrity
                )
            except OSError as error:
                text = f"cannot serve bytes to other nodes at {host} port {self._port or 'any'}: {error.strerror}"
                raise ConfigError(text, hint="set bulk_port to a free port, or 0 for any") from None
            self._server.start()
            self._plane.offer_bulk(self._server.port)

    def close(self) -> None:
        """Ends every connection."""
        if self._server is not None:
            self._server.close()

    def problems(self) -> list[str]:
        """What keeps others from fetching, for status."""
        problem = self._server.problem() if self._server is not None else ""
        return [problem] if problem else []

    def _served(self, link_id: str, ask: wire.Ask, rank: int) -> Served:
        guest = self._plane.bulk_guest(link_id)
        if guest is None or ask.job not in guest.jobs:
            raise PeerError(f"job {ask.job.job!r} is none that you have here")
        return open_served(self._arena, ask, rank)

    def _secret_of(self, link_id: str) -> bytes | None:
        guest = self._plane.bulk_guest(link_id)
        return guest.secret if guest is not None else None
