"""Clients in this process, as one rank of one job."""

import ckptd_client

JOB = "job"


def client_of(node, **settings):
    """An open client of the node's daemon, for the caller to close."""
    return ckptd_client.connect(JOB, **{"store": node.store, "arena": node.arena, "start": False} | settings)
