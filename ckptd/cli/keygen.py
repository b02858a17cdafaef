"""``ckptd keygen``: a key pair for daemons whose site wants to say which one they use."""

import os

import click

from ckptd.cli import common
from ckptd.peers.keys import make_keys, write_keys

SCHEMA = 1
_DEFAULT = "~/.config/ckptd/key.toml"


@click.command(epilog=common.example("ckptd keygen", "ckptd keygen /etc/ckptd/key.toml"))
@click.argument("file", default=_DEFAULT, type=click.Path(dir_okay=False))
@common.json_option
def command(file: str, as_json: bool) -> int:
    """Write a CURVE key pair to FILE, for the setting key_file. FILE is readable by you alone and never replaced.

    Without key_file each daemon makes a pair of its own with its arena, and nothing needs to be typed.
    """
    path = os.path.abspath(os.path.expanduser(file))
    if file == _DEFAULT:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    keys = make_keys()
    write_keys(path, keys)
    if as_json:
        common.print_json({"schema": SCHEMA, "file": path, "public": keys.public})
    else:
        click.echo(
            f"wrote {path}\npublic key: {keys.public}\nuse it: CKPTD_KEY_FILE={path}, or key_file in config.toml"
        )
    return 0
