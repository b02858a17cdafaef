"""What breaks a link at one of its ends."""

from ckptd.peers.link import Link


def give_up(link: Link) -> None:
    """More waits for the other side than a link queues, so its connection is given up, if there is one."""
    while link.send(b""):
        pass
