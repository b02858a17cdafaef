"""COMMITTED: the small record that makes a directory of final name a checkpoint. Pure."""

from functools import partial
from typing import Annotated

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import Counter, Incarnation, JobName, Nbytes, SaveId, Step, StoreId, WorldSize
from ckptd.shared.format.dropped import Dropped
from ckptd.shared.format.integrity import XXH3, DigestKind, Integrity, KeyId, Purpose
from ckptd.shared.format.manifest import MAX_RECORD_NBYTES, LeftOut, Manifest
from ckptd.shared.format.replica_attestations import Compared
from ckptd.shared.format.root_names import manifest_name
from ckptd.shared.format.save_metadata import SaveMetadata
from ckptd.shared.format.sealed_record import VERSION, check_version, of_committed

MAX_COMMITTED_NBYTES = 64 << 10


class Committed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The small JSON that makes a directory of final name a checkpoint, if it matches the manifest.

    With a key it is proved by itself: proof is the digest of all other fields.
    """

    format: int
    store_id: StoreId
    job: JobName
    save_id: Annotated[str, msgspec.Meta(max_length=96)]
    step: Step
    incarnation: Incarnation
    counter: Counter
    run: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    world_size: WorldSize
    files: WorldSize
    nbytes: Nbytes
    manifest_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORD_NBYTES)]
    manifest_digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    digest_kind: DigestKind
    key_id: KeyId = ""
    replicas: Compared = Compared.NO_REPLICAS  # how much of what its ranks hold alike was compared when it was saved
    left_out: LeftOut = ""  # why plain dcp.load finds no `.metadata`, where it was meant to
    metadata: SaveMetadata = {}  # what the training said of the save, such as its loss
    dropped: Dropped = ()  # names below which it has had values, and has none any more
    proof: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""

    @property
    def save(self) -> SaveId:
        """The checkpoint this record belongs to."""
        return SaveId(self.incarnation, self.counter, self.step, bytes.fromhex(self.run))

    @property
    def manifest(self) -> str:
        """Name of the manifest that it selects."""
        return manifest_name(bytes.fromhex(self.manifest_digest))


_encoder = msgspec.msgpack.Encoder()
_committed_decoder = msgspec.json.Decoder(Committed)


def make_committed(manifest: Manifest, manifest_raw: bytes, integrity: Integrity = XXH3) -> Committed:
    """The COMMITTED record of a manifest and its file content."""
    bare = Committed(
        format=VERSION, store_id=manifest.store_id, job=manifest.job, save_id=manifest.save.text,
        step=manifest.save.step,
        incarnation=manifest.save.incarnation, counter=manifest.save.counter, run=manifest.save.run.hex(),
        world_size=manifest.world_size,
        files=manifest.files, nbytes=manifest.nbytes,
        manifest_nbytes=len(manifest_raw),
        manifest_digest=integrity.digest(manifest_raw, Purpose.MANIFEST_FILE).hex(),
        digest_kind=integrity.kind, key_id=integrity.key_id,
        replicas=manifest.replicas, left_out=manifest.left_out, metadata=manifest.metadata,
        dropped=manifest.dropped,
    )  # fmt: skip
    return msgspec.structs.replace(bare, proof=_proof(bare, integrity))


def _proof(committed: Committed, integrity: Integrity) -> str:
    """With a key, the proof of the record alone, for readers without a manifest. Without a key, none."""
    if not integrity.keyed:
        return ""
    return integrity.digest(_encoder.encode(msgspec.structs.replace(committed, proof="")), Purpose.COMMITTED).hex()


def encode_committed(committed: Committed) -> bytes:
    """File content of COMMITTED: indented JSON and a newline. Raises CkptdError for one that no reader takes."""
    data = msgspec.json.format(msgspec.json.encode(committed)) + b"\n"
    if len(data) > MAX_COMMITTED_NBYTES:
        text = f"COMMITTED of {committed.save} would have {len(data):,} bytes, readers take {MAX_COMMITTED_NBYTES:,}"
        raise CkptdError(text, hint="its metadata and the keys that were dropped are in it: fewer, or shorter ones")
    return data


def decode_committed(data: bytes, *, where: str, integrity: Integrity = XXH3) -> Committed:
    """The record in COMMITTED. Raises DamagedError, naming where; IntegrityError as decode_vote does."""
    committed = decoded(_committed_decoder.decode, data, where, look=partial(of_committed, where=where))
    check_version(committed.format, where, "format")
    integrity.check(committed.digest_kind, committed.key_id, where)
    if committed.proof != _proof(committed, integrity):
        raise DamagedError(f"{where}: its proof does not match: the record is damaged, or forged")
    return committed
