"""``ckptd keygen``: a key pair for daemons whose site wants to say which one they use; or an integrity key."""

import os

import click
import msgspec

from ckptd.cli import common
from ckptd.peers.keys import make_keys, write_keys
from ckptd.shared.files.integrity_key import write_key
from ckptd.shared.files.paths import resolved

SCHEMA = 1
_DEFAULT = "~/.config/ckptd/key.toml"
_DEFAULT_INTEGRITY = "~/.config/ckptd/integrity.toml"


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    file: str
    public: str | msgspec.UnsetType = msgspec.UNSET  # of a key pair
    key_id: str | msgspec.UnsetType = msgspec.UNSET  # of an integrity key


@click.command(
    epilog=common.example("ckptd keygen", "ckptd keygen /etc/ckptd/key.toml", "ckptd keygen --integrity integrity.toml")
)
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--integrity", is_flag=True, help="A key for integrity = keyed, in place of a key pair.")
@common.json_option
def command(file: str | None, integrity: bool, as_json: bool) -> int:
    """Write a CURVE key pair to FILE, for the setting key_file. FILE is readable by you alone and never replaced.

    Without key_file each daemon makes a pair of its own with its arena, and nothing needs to be typed.

    With --integrity FILE gets a secret for the setting integrity_key_file: the same file for all daemons and trainings
    of a site, and for readers of their checkpoints. A holder of the key can forge whatever it proves.
    """
    path = resolved(file or (_DEFAULT_INTEGRITY if integrity else _DEFAULT))
    if file is None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    if integrity:
        key = write_key(path)
        told, said = Output(file=path, key_id=key.key_id), f"key id: {key.key_id}"
        use = f"CKPTD_INTEGRITY_KEY_FILE={path} for daemons and trainings, or integrity_key_file in config.toml"
    else:
        keys = make_keys()
        write_keys(path, keys)
        told, said = Output(file=path, public=keys.public), f"public key: {keys.public}"
        use = f"CKPTD_KEY_FILE={path}, or key_file in config.toml"
    if as_json:
        common.print_json(told)
    else:
        click.echo(f"wrote {path}\n{said}\nuse it: {use}")
    return 0
