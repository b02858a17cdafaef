"""Where things lie in an arena. Messages name slots relative to it, so that containers can mount it anywhere."""

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.digest import digest

SOCKET = "ckptd.sock"
LOCK = "lock"
LOG = "ckptd.log"
IDENTITY = "identity"  # keys of the daemon
NUMBERS = "numbers"  # incarnations that the clock has not passed
STORES = "stores"  # the ids of stores that jobs of this arena were saved to
BALLAST = "ballast"  # memory that the small files above and below can always have
JOBS = "jobs"
SLOT_SUFFIX = ".slot"
PARTIAL_SUFFIX = ".part"  # of a segment of another node, for a load
RANK_SUFFIX = ".rank"
TOPOLOGY = "topology"  # of a job, in its directory
PARITY_SUFFIX = ".parity"
READ_GROUP_SUFFIX = ".group"
STEPS_SUFFIX = ".steps"
DUE_SUFFIX = ".publication"  # of a save, still to be done
PUBLISHED_SUFFIX = ".published"  # and done
JOURNAL_SUFFIX = ".journal"  # of a segment of the job's journal, until the store has it


def job_dir(key: JobKey) -> str:
    """Directory of a job's slots: its name and eight hex digits of its store, so that equal names never meet."""
    return f"{JOBS}/{key.job}-{digest(key.store.encode()).hex()[:8]}"


def slot_name(rank: int, serial: int) -> str:
    """File name of a rank's slot. A serial is never used twice while the job exists."""
    return f"r{rank:05d}-{serial:06d}{SLOT_SUFFIX}"


def parse_slot_name(name: str) -> tuple[int, int] | None:
    """(rank, serial) of a slot's file name, None for any other name."""
    stem = name.removesuffix(SLOT_SUFFIX)
    rank, _, serial = stem.removeprefix("r").partition("-")
    if stem != name and rank.isdigit() and serial.isdigit() and slot_name(int(rank), int(serial)) == name:
        return int(rank), int(serial)
    return None


def partial_name(rank: int, serial: int) -> str:
    """File name of a part of another node's segment: no slot's, so that nobody takes it for one."""
    return slot_name(rank, serial).removesuffix(SLOT_SUFFIX) + PARTIAL_SUFFIX


def parity_name(save: SaveId, epoch: int) -> str:
    """File name of a node's parity of a save."""
    return f"p{save.text}-{epoch:08d}{PARITY_SUFFIX}"


def spare_name(serial: int) -> str:
    """File name of memory that the next parity takes."""
    return f"spare-{serial:06d}{PARITY_SUFFIX}"


def read_group_name(name: str) -> str:
    """File that ranks of the node map to read a checkpoint on the store together; removed once all have it open."""
    return f"{name}{READ_GROUP_SUFFIX}"


def rank_file_name(rank: int, session: str) -> str:
    """File that a rank keeps locked while it runs. One per rank and session, so an old rank never hides a new one."""
    return f"r{rank:05d}-{digest(session.encode()).hex()[:16]}{RANK_SUFFIX}"


def steps_name(rank: int, session: str) -> str:
    """File by which a rank and its daemon agree on a step (ckptd.shared.format.step_board): beside its rank file."""
    return steps_beside(rank_file_name(rank, session))


def steps_beside(rank_file: str) -> str:
    """The same, from the name or the path of the rank file."""
    return rank_file.removesuffix(RANK_SUFFIX) + STEPS_SUFFIX
