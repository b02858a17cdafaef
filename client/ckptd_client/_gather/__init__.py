"""Full tensors from sharded ones: ``Client.gather``."""

from ckptd_client._gather._gathering import BUCKET_NBYTES, Gathering, Order, Ranks
from ckptd_client._gather._groups import Groups
from ckptd_client._gather._leaves import FlatPart

GROUPS = Groups()  # of this process: process groups are its own, not a client's

__all__ = ["BUCKET_NBYTES", "GROUPS", "FlatPart", "Gathering", "Groups", "Order", "Ranks"]
