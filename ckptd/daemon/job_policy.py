"""The numbers that the core decides by, from the settings."""

from ckptd.core.policy import Policy
from ckptd.system.config import Config


def policy_of(config: Config) -> Policy:
    """For every job of this daemon."""
    return Policy(
        slots_per_rank=config.slots_per_rank,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        connect_timeout_s=config.connect_timeout_s,
        stage_timeout_s=config.stage_timeout_s,
        read_timeout_s=config.read_timeout_s,
        orphan_ttl_s=config.orphan_ttl_s,
        arena=config.arena,
        client_started=config.exit_when_empty,
        drain_parity=config.drain_parity,
    )
