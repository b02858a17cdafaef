"""Full tensors from sharded ones: ``Client.gather``."""

from ckptd_client.gathering._gathering import BUCKET_NBYTES, Gathering, Order
from ckptd_client.gathering._groups import Groups
from ckptd_client.gathering._leaves import FlatPart

__all__ = ["BUCKET_NBYTES", "FlatPart", "Gathering", "Groups", "Order"]
