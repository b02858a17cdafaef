"""What core's own tests of dist_checkpointing ask of a save strategy, asked of ours; each rank of test_megatron.py.

Named after them. Two ranks; what is saved by ours is loaded by core's stock strategy, unless a case says otherwise.
"""

import io
import json
import os
import shutil
import sys
import traceback
from datetime import tzinfo

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor, load
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import diff
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import (
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron_training import begin, end
from torch.distributed.checkpoint import CheckpointException

import ckptd_client
from ckptd.shared.base.errors import SaveFailedError, UsageError
from ckptd_client.integrations.megatron import CkptdLoadStrategy, CkptdSaveStrategy

CASES = []
part = ShardedTensor.from_rank_offsets


def case(function):
    CASES.append(function)
    return function


class Bench:
    """The client and strategies of all cases, and a directory for each save."""

    def __init__(self, folder):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.client = ckptd_client.connect("cases", start=False, redundancy="none")
        self.strategy = CkptdSaveStrategy(self.client)
        self._folder, self._step = folder, 0

    def directory(self):
        self._step += 1
        path = os.path.join(self._folder, f"iter_{self._step:07d}")
        if self.rank == 0:
            os.makedirs(path)
        dist.barrier()
        return path

    def save(self, state, strategy=None, **options):
        path = self.directory()
        dist_checkpointing.save(state, path, strategy or self.strategy, **options)
        return path

    def begin(self, path, state):
        """A save of core's asynchronous kind; the queue that ends it."""
        queue = AsyncCallsQueue()
        queue.schedule_async_request(dist_checkpointing.save(state, path, self.strategy, async_sharded_save=True))
        return queue

    def save_into(self, path, state, *, asynchronous):
        if asynchronous:
            self.begin(path, state).maybe_finalize_async_calls(blocking=True)
        else:
            dist_checkpointing.save(state, path, self.strategy)

    def rows(self, key, tensor, **options):
        """This rank's rows of a tensor."""
        return part(key, tensor, (0, self.rank, self.size), **options)

    def whole(self, key, tensor):
        """A tensor that all ranks have."""
        return part(key, tensor, replica_id=self.rank)


def same(one, other):
    assert not any(map(bool, diff(one, other))), diff(one, other)


@case
def single_process_save_load(b):
    path = b.save({"a": b.whole("A", torch.arange(8.0).view(2, 4)), "b": b.whole("B", torch.ones(3, 5, 7))})
    loaded = load({"other name": b.whole("A", torch.empty(2, 4))}, path)
    same(loaded, {"other name": torch.arange(8.0).view(2, 4)})


@case
def multi_process_save(b):
    state = {
        "a": b.rows("A", torch.full((2, 4), float(b.rank))),
        "b": part("B", torch.ones(3, 5, 7), (2, b.rank, b.size)),
        "lr": 0.01,
        "rank": b.rank,
    }

    def without_rank(common):
        del common["rank"]
        return common

    path = b.save(state, preprocess_common_before_consistancy_check=without_rank)
    assert load_common_state_dict(path)["lr"] == 0.01
    loaded = load({"a": b.whole("A", torch.empty(4, 4)), "b": b.whole("B", torch.empty(3, 5, 14))}, path)
    assert torch.equal(loaded["a"], torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 4))
    assert torch.equal(loaded["b"], torch.ones(3, 5, 14))


@case
def partition_change_save_load(b):
    whole = torch.arange(4 * 5 * 8.0).view(4, 5, 8)
    path = b.save({"a": part("A", whole.chunk(2, 2)[b.rank].contiguous(), (2, b.rank, 2))})
    same(load({"a": b.whole("A", torch.empty(4, 5, 8))}, path), {"a": whole})
    loaded = load({"a": b.rows("A", torch.empty(2, 5, 8))}, path)
    same(loaded, {"a": whole.chunk(2, 0)[b.rank]})
    loaded = load(
        {"a": part("A", torch.empty(5, 8), (0, 2 + b.rank, 4), prepend_axis_num=1)},
        path,
        validate_access_integrity=False,
    )
    same(loaded, {"a": whole[2 + b.rank]})


@case
def prepended_axes(b):
    path = b.save(
        {"a": part("A", torch.full((3, 4), b.rank, dtype=torch.bfloat16), (0, b.rank, 2), prepend_axis_num=1)}
    )
    whole = load({"a": b.whole("A", torch.empty(2, 3, 4, dtype=torch.bfloat16))}, path)["a"]
    assert torch.equal(whole[1], torch.ones(3, 4, dtype=torch.bfloat16))
    assert torch.equal(whole[0], torch.zeros(3, 4, dtype=torch.bfloat16))


@case
def several_shards_of_a_key(b):
    whole = torch.arange(12).view(4, 3)
    mine = {f"a{row}": part("A", whole[row : row + 1].clone(), (0, row, 4)) for row in (b.rank, b.rank + 2)}
    path = b.save(mine)
    same(load({"a": b.whole("A", torch.empty(4, 3, dtype=torch.int64))}, path), {"a": whole})
    back = {f"a{row}": part("A", torch.empty(1, 3, dtype=torch.int64), (0, row, 4)) for row in (b.rank, b.rank + 2)}
    same(load(back, path, CkptdLoadStrategy(b.client)), {f"a{r}": whole[r : r + 1] for r in (b.rank, b.rank + 2)})


@case
def tensors_metadata(b):
    path = b.save(
        {"a": b.rows("A", torch.arange(10) + b.rank * 10), "b": part("B", torch.ones(3, 5, 7), (2, b.rank, 2))}
    )
    found = load_tensors_metadata(path)
    assert found.keys() == {"A", "B"}
    assert found["A"].global_shape == (20,)
    assert found["B"].global_shape == found["B"].local_shape == (3, 5, 14)
    assert found["B"].global_offset == (0, 0, 0)
    same(load(found, path, validate_access_integrity=False)["A"], torch.arange(20))
    same(load_plain_tensors(path)["A"], torch.arange(20))


@case
def can_mix_sharded_tensors_and_factories(b):
    def build(key, tensor, replica_id, _range):
        return [part(f"{key}{i}", tensor, replica_id=replica_id) for i in range(3)]

    def state(base):
        return {
            "all": [
                b.whole("A", torch.arange(2) + base),
                ShardedTensorFactory("D", torch.arange(5) + base, build, sum, b.rank),
            ]
        }

    path = b.save(state(0))
    same(load(state(10), path), {"all": [torch.arange(2), torch.arange(5) * 3]})


@case
def load_error_msg(b):
    path = b.save({"a": b.whole("A", torch.rand(10))})
    wanted = {"x": b.whole("other", torch.empty(10))}
    for strategy in (None, CkptdLoadStrategy(b.client)):
        with pytest.raises(CheckpointException, match="other"):  # of torch's
            load(dict(wanted), path, strategy)
    missing = os.path.join(path, "not there")
    with pytest.raises(CheckpointingException, match="not there does not exist"):
        load(wanted, missing)


@case
def sharded_object_serialization(b):
    def state(value):
        return {
            "x": ShardedObject("X", value, (2,), (b.rank,)),
            "y": ShardedObject("Y", value, (1,), (0,), replica_id=b.rank),
        }

    stream = io.BytesIO(b"transformer engine's")
    values = {"rng": torch.get_rng_state(), "list": [1, ("two", None)], "rank": b.rank, "stream": stream}
    path = b.save(state(values))
    for strategy in (None, CkptdLoadStrategy(b.client)):
        loaded = load(state(None), path, strategy)
        assert torch.equal(loaded["x"]["rng"], values["rng"])
        assert loaded["x"]["rank"] == b.rank
        assert loaded["x"]["list"] == [1, ("two", None)]
        assert loaded["x"]["stream"].getvalue() == stream.getvalue()
        assert loaded["y"]["rank"] == 0
    found = load_sharded_metadata(path)
    assert {key.partition("/")[0] for key in found} == {"X", "Y"}
    assert len(found) == 3


@case
def tensor_shape_mismatch(b):
    path = b.save({"a": b.rows("A", torch.arange(12.0).view(3, 4))})
    with pytest.raises(CheckpointException, match="mismatch"):
        load({"a": b.whole("A", torch.empty(5, 4))}, path)
    wider = part("A", torch.ones(8, 4), replica_id=b.rank, allow_shape_mismatch=True)
    loaded = load({"a": wider}, path)["a"]
    assert torch.equal(loaded[3:6], torch.arange(12.0).view(3, 4))
    assert not loaded[6:].any()


@case
def content_metadata(b):
    path = b.save({"a": b.whole("A", torch.ones(2))}, content_metadata={"optimizer": "none"})
    assert load_content_metadata(path) == {"optimizer": "none"}


@case
def nonpersistent_objects(b):
    path = b.save({"a": b.whole("A", torch.ones(2)), "mine": LocalNonpersistentObject(b.rank)})
    loaded = load({"a": b.whole("A", torch.empty(2)), "mine": LocalNonpersistentObject(5)}, path)
    assert loaded["mine"] == 5
    assert "mine" not in load_common_state_dict(path)


@case
def strict_flags(b):
    path = b.save({"a": b.whole("A", torch.ones(2)), "b": b.whole("B", torch.ones(2))})
    wanted = {"a": b.whole("A", torch.empty(2)), "z": b.whole("Z", torch.empty(2))}
    for strategy in (None, CkptdLoadStrategy(b.client)):
        loaded, missing, unexpected = load(dict(wanted), path, strategy, strict=StrictHandling.RETURN_ALL)
        assert (missing, unexpected) == ({"B"}, {"Z"})
        assert loaded.keys() == {"a"}
    with pytest.raises(CheckpointingException):
        load(dict(wanted), path, strict=StrictHandling.RAISE_ALL)


@case
def async_is_equivalent_to_sync(b):
    def state(value):
        return {
            "a": b.whole("A", torch.full((2, 4), value)),
            "b": part("B", torch.full((3, 5), value), replica_id=1 - b.rank),
        }

    path, saved = b.directory(), state(3.0)
    queue = b.begin(path, saved)
    for shard in saved.values():
        shard.data.zero_()  # training goes on at once
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    same(load(state(0.0), path), load(state(0.0), b.save(state(3.0))))


@case
def two_async_saves_at_once(b):
    queue, paths = AsyncCallsQueue(), []
    for number in range(2):
        paths.append(b.directory())
        state = {"a": b.rows("A", torch.full((100,), float(number)))}
        queue.schedule_async_request(dist_checkpointing.save(state, paths[-1], b.strategy, async_sharded_save=True))
    queue.maybe_finalize_async_calls(blocking=True)
    for number, path in enumerate(paths):
        same(load({"a": b.whole("A", torch.empty(200))}, path), {"a": torch.full((200,), float(number))})


@case
def errors_are_reported(b):
    class Mine(tzinfo):
        """Has no safe encoding."""

    for wrong in (0, 1):
        for asynchronous in (True, False):
            value = Mine() if b.rank == wrong else None
            state = {"a": b.rows("A", torch.ones(4)), "x": ShardedObject("X", value, (2,), (b.rank,))}
            path = b.directory()
            with pytest.raises(SaveFailedError, match=f"(?s)rank {wrong}.*Mine"):
                b.save_into(path, state, asynchronous=asynchronous)
            assert sorted(os.listdir(path)) == ["common.pt"] or wrong, os.listdir(path)
            assert "metadata.json" not in os.listdir(path)


@case
def fully_parallel_save_and_load(b):
    state = {f"{i}": b.whole(f"K{i}", torch.full((1000,), float(i))) for i in range(8)}
    before = b.client.stats().nbytes
    path = b.save(state, FullyParallelSaveStrategyWrapper(b.strategy))
    written = torch.tensor(b.client.stats().nbytes - before)
    parts = [torch.empty_like(written) for _ in range(b.size)]
    dist.all_gather(parts, written)
    assert all(16000 <= nbytes < 28000 for nbytes in parts), parts  # with headers
    ours = FullyParallelLoadStrategyWrapper(CkptdLoadStrategy(b.client), exchange_algo="gather_object")
    for wrapped in (ours, None):
        wanted = {f"{i}": b.whole(f"K{i}", torch.empty(1000)) for i in range(8)}
        loaded = load(wanted, path, wrapped)
        same(loaded, {f"{i}": torch.full((1000,), float(i)) for i in range(8)})


@case
def a_directory_outlives_the_checkpoint_of_the_store(b):
    path = b.save({"a": b.rows("A", torch.ones(4))})
    with open(os.path.join(path, ".ckptd")) as file:
        checkpoint = json.load(file)["checkpoint"]
    dist.barrier()
    b.save({"a": b.rows("A", torch.zeros(4))})  # newer, so the first may leave the arena
    if b.rank == 0:
        shutil.rmtree(os.path.join(os.environ["CKPTD_STORE"], "cases", checkpoint))
    dist.barrier()
    for strategy in (None, CkptdLoadStrategy(b.client)):
        same(load({"a": b.whole("A", torch.empty(8))}, path, strategy), {"a": torch.ones(8)})


@case
def what_core_alone_saved_over_ours_is_loaded(b):
    path = b.save({"a": b.rows("A", torch.ones(4))})
    dist_checkpointing.save({"a": b.rows("A", torch.zeros(4))}, path)
    filesystem_async._results_queue._manager.shutdown()  # a process that would outlive this one
    filesystem_async._results_queue = None
    loading = CkptdLoadStrategy(b.client)
    same(load({"a": b.whole("A", torch.empty(8))}, path, loading), {"a": torch.zeros(8)})
    assert loading.tier is None


@case
def one_step_is_saved_at_two_places(b):
    state, path = {"a": b.rows("A", torch.ones(4))}, b.directory()
    paths = [path, os.path.join(path + "-best", os.path.basename(path))]
    if b.rank == 0:
        os.makedirs(paths[1])
    dist.barrier()
    for each in paths:
        dist_checkpointing.save(dict(state), each, b.strategy)
        same(load({"a": b.whole("A", torch.empty(8))}, each), {"a": torch.ones(8)})


@case
def a_strategy_wants_a_client(b):
    with pytest.raises(UsageError, match="open client"):
        CkptdSaveStrategy("cases")


if __name__ == "__main__":
    begin()
    bench = Bench(sys.argv[1])
    for function in CASES:
        try:
            function(bench)
        except BaseException:
            print(f"rank {bench.rank}: {function.__name__} FAILED\n{traceback.format_exc()}", flush=True)
            if function.__name__ in sys.argv[2:]:
                raise
        else:
            print(f"rank {bench.rank}: {function.__name__} passed", flush=True)
        dist.barrier()
    bench.client.close()
    end()
