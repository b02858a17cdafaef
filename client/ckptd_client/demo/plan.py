"""The length of the training, its saves and kills, what a step computes, and the task of one rank."""

import msgspec

RANKS_PER_NODE = 2
NODES = 2
WORLD_SIZE = NODES * RANKS_PER_NODE


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does in a step: batch windows of context bytes; then it waits for pause_s, which takes no core."""

    batch: int
    context: int
    pause_s: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's steps. Checkpoints are saved after every step s with (s + 1) % save_every == 0.

    A slowed drain and the pause to the next take 3 s at most, and one is to begin between lose_node_after and the end.
    """

    steps: int
    save_every: int
    kill_rank_after: int  # act 2: one rank dies when this step's loss is known
    lose_node_after: int  # act 3: the first drain seen after this step is cut off
    work: Work


FULL = Plan(steps=50, save_every=5, kill_rank_after=12, lose_node_after=21, work=Work(batch=2, context=128, pause_s=0))
SHORT = Plan(
    steps=30, save_every=3, kill_rank_after=7, lose_node_after=10, work=Work(batch=1, context=64, pause_s=0.15)
)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a rank, in addition to torchrun's variables; its first argument, as JSON.

    Without an arena the rank trains without ckptd and times torch.save into store instead.
    """

    steps: int
    save_every: int
    work: Work
    journal: str  # the rank's own file, created by it
    store: str
    job: str
    arena: str | None
