"""The numbers that the core decides by, from the settings."""

from dataclasses import fields

from ckptd.core.policy import Policy
from ckptd.system.config import Config

_OF_ONE_NAME = [field.name for field in fields(Policy) if field.name in Config.__struct_fields__]


def policy_of(config: Config) -> Policy:
    """For every job of this daemon: a number that is a setting too has the setting's value."""
    values = {name: getattr(config, name) for name in _OF_ONE_NAME}
    return Policy(**values, client_started=config.exit_when_empty)
