import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from ckptd.shared.base.errors import UsageError  # noqa: E402
from ckptd.shared.format.layout import itemsize  # noqa: E402
from ckptd_client._state.tensors import CODE_OF, DTYPE_OF, alias_key, describe, is_tensor, shard_of  # noqa: E402


def test_codes_agree_with_the_protocol_and_with_safetensors():
    stock = pytest.importorskip("safetensors.torch")._TYPES
    for dtype, code in CODE_OF.items():
        assert itemsize(code) == dtype.itemsize
        assert stock.get(code, dtype) == dtype
        assert DTYPE_OF[code] is dtype
    assert {torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn} <= CODE_OF.keys()


def test_plain_tensors_parameters_buffers_and_views():
    base = torch.randn(4, 6)
    for tensor in (base, torch.nn.Parameter(base), base.t()[1:], base.expand(3, 4, 6), base[:0]):
        assert describe(tensor, "state['w']") == ("F32", tuple(tensor.shape))
    assert describe(torch.tensor(1, dtype=torch.int64), "") == ("I64", ())
    assert describe(torch.randn(2, dtype=torch.complex64).conj(), "") == ("C64", (2,))
    assert describe(torch.randn(2, dtype=torch.complex64).conj().imag, "") == ("F32", (2,))
    assert describe(torch.randn(3).bfloat16(), "") == ("BF16", (3,))
    if hasattr(torch.nn, "Buffer"):
        assert describe(torch.nn.Buffer(torch.ones(2)), "") == ("F32", (2,))


class Special(torch.Tensor):
    pass


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda: torch.empty(2, device="meta"), "meta device", "to_empty"),
        (lambda: torch.eye(2).to_sparse(), "sparse", "to_dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse", "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized", "int_repr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested", "unbind"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor", "unbind"),
        (lambda: torch.empty(2, dtype=torch.uint4), "torch.uint4", "torch.uint8"),
        (lambda: torch.empty(2, dtype=torch.bits8), "torch.bits8", "torch.uint8"),
        (lambda: torch.empty(2, dtype=torch.complex32), "torch.complex32", "view_as_real"),
        (lambda: Special(torch.ones(2)), "Special", "plain tensors"),
        (lambda: torch.nn.Parameter(Special(torch.ones(2))), "Special", "plain tensors"),
        (lambda: torch.nn.LazyLinear(3).weight, "UninitializedParameter", "run the module"),
        (freed, "storage was freed", "unshard"),
    ],
)
def test_what_cannot_be_saved_says_where_and_what_to_do(make, message, hint):
    with pytest.raises(UsageError) as caught:
        describe(make(), "state['model']['w']")
    assert "state['model']['w']" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_class_that_is_only_called_dtensor_is_a_subclass_like_others():
    class DTensor(torch.Tensor):
        pass

    with pytest.raises(UsageError, match=r"state\['w'\] is a .*DTensor, a tensor subclass"):
        shard_of(DTensor(torch.ones(1)), "state['w']")


@pytest.fixture
def mesh():
    """Of 8 ranks of which this process is the sixth; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_a_plain_tensor_is_all_of_itself():
    tensor = torch.ones(3, 4)
    assert shard_of(tensor, "w") == ("F32", (3, 4), (((0, 0), (3, 4), tensor),))


@pytest.mark.parametrize(
    ("shape", "placements", "offsets", "sizes"),
    [
        ((8, 8), [Replicate(), Shard(0)], (2, 0), (2, 8)),
        ((8, 8), [Replicate(), Shard(1)], (0, 2), (8, 2)),
        ((8, 8), [Shard(0), Shard(1)], (4, 2), (4, 2)),
        ((8, 8), [Replicate(), Replicate()], (0, 0), (8, 8)),
        ((5, 3), [Replicate(), Shard(0)], (2, 0), (2, 3)),
        ((16, 3), [Shard(0), Shard(0)], (10, 0), (2, 3)),
        ((), [Replicate(), Replicate()], (), ()),
    ],
)
def test_a_dtensor_is_the_box_that_this_rank_has(shape, placements, offsets, sizes, mesh):
    tensor = DTensor.from_local(
        torch.ones(sizes), mesh, placements, run_check=False, shape=shape, stride=torch.empty(shape).stride()
    )
    shard = shard_of(tensor, "w")
    (chunk,) = shard.chunks
    assert (chunk.sizes, shard.global_shape, chunk.offsets) == (sizes, shape, offsets)
    assert chunk.local.data_ptr() == tensor.to_local().data_ptr()
    assert not shard.absent


def test_a_shard_without_elements_is_absent(mesh):
    tensor = DTensor.from_local(
        torch.ones(0, 3), mesh, [Replicate(), Shard(0)], run_check=False, shape=(1, 3), stride=(3, 1)
    )
    assert shard_of(tensor, "w").absent
    assert not shard_of(torch.empty(0, 3), "w").absent


def test_a_partial_dtensor_is_refused_with_its_place(mesh):
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False)
    with pytest.raises(UsageError, match=r"state\['w'\] is a DTensor with a partial placement"):
        shard_of(tensor, "state['w']")


def test_is_tensor():
    assert is_tensor(Special(torch.ones(1)))
    assert is_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not is_tensor([torch.ones(1)])


def test_tied_tensors_have_one_alias_key():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    key = alias_key(weight)
    assert key is not None
    assert key == alias_key(weight.detach()) == alias_key(weight.view(4, 4))
    others = [weight.t(), weight[1:], weight.view(16), weight.clone(), weight.detach().view(torch.int32)]
    assert key not in {alias_key(other) for other in others}
    values = torch.randn(2, dtype=torch.complex64)
    assert alias_key(values) != alias_key(values.conj())
    assert alias_key(weight[:0]) is None
