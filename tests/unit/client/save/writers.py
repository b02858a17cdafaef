"""Everybody who may write to a tensor that is being copied: what each does, and to which kind of memory.

Each is called with a Victim, while a save's late copy waits, runs, or has just ended.
"""

import ctypes
import gc
import mmap
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from tests import pythons

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
NBYTES = 8 << 20
_MREMAP_MAYMOVE, _MREMAP_DONTUNMAP, _MAP_FIXED = 1, 4, 0x10


class Touch(torch.optim.Optimizer):
    """Adds one to everything."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 1.0})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1)


class Victim:
    """A training of one large tensor, in memory of this kind, and a small one."""

    def __init__(self, kind="malloc"):
        self.mapping = _MAPPINGS[kind]() if kind in _MAPPINGS else None
        values = torch.arange(NBYTES // 4, dtype=torch.float32)
        tensor = values if self.mapping is None else torch.frombuffer(self.mapping, dtype=torch.float32).copy_(values)
        self.large, self.small = nn.Parameter(tensor), nn.Parameter(torch.ones(3))
        self.large.grad, self.small.grad = torch.ones_like(self.large), torch.ones(3)
        self.optimizer = Touch([self.large, self.small])
        self.address = self.large.data_ptr()
        self.keep = []

    @property
    def state(self):
        return {"large": self.large, "small": self.small}

    @property
    def numbers(self):
        return self.large.detach().numpy()

    @property
    def middle(self):
        """An address well inside, of a small page."""
        return (self.address + NBYTES // 2) // 4096 * 4096


_MAPPINGS = {
    "mmap": lambda: mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "shared": lambda: mmap.mmap(-1, NBYTES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
}


def in_place(victim):
    with torch.no_grad():
        victim.large.mul_(2)


def one_element(victim):
    victim.large.data[NBYTES // 8] = -1.0


def data_copy(victim):
    victim.large.data.copy_(torch.zeros_like(victim.large))


def average_in_and_back(victim):
    """What an average's `average_parameters()` does around an evaluation: the bits are back in the end."""
    kept = victim.large.data.clone()
    victim.large.data.copy_(torch.zeros_like(kept))
    victim.large.data.copy_(kept)


def same_bits_again(victim):
    victim.numbers[:] = victim.numbers.copy()


def other_memory(victim):
    victim.keep.append(victim.large.data)
    victim.large.data = torch.zeros_like(victim.large)


def other_memory_and_free(victim):
    victim.large.data = torch.zeros_like(victim.large)
    gc.collect()
    victim.keep += [torch.full((NBYTES // 4,), -7.0) for _ in range(4)]


def foreach(victim):
    torch._foreach_mul_([victim.large.data, victim.small.data], 3.0)


def unattached_fused(victim):
    torch.optim.AdamW([victim.large], lr=0.1, fused=True).step()


def unattached_foreach(victim):
    torch.optim.SGD([victim.large], lr=0.1, foreach=True).step()


def numpy(victim):
    victim.numbers[NBYTES // 8] = -2.0


def numpy_alias(victim):
    torch.from_numpy(victim.numbers).add_(1)


def dlpack(victim):
    torch.from_dlpack(victim.large.detach()).add_(1)


def memory_view(victim):
    memoryview(victim.numbers).cast("B")[NBYTES // 2] = 255


def thread(victim):
    writer = threading.Thread(target=in_place, args=(victim,))
    writer.start()
    writer.join()


def pool(victim):
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: victim.numbers.__setitem__(slice(i * 9000, i * 9000 + 9), -3.0), range(300)))


def by_ctypes(victim):
    ctypes.memset(victim.middle, 0xFF, 64)


def load_state_dict(victim):
    module = nn.Module()
    module.large = victim.large
    module.load_state_dict({"large": torch.zeros_like(victim.large)})


def sharpness_ascent(victim):
    with torch.no_grad():
        victim.large.add_(victim.large.grad, alpha=0.05)


def adapter_merge(victim):
    victim.large.data[: 1 << 20] += torch.randn(1 << 20)


def exchange(victim):
    other = torch.zeros_like(victim.large)
    victim.large.data, other.data = other.data, victim.large.data
    victim.keep.append(other)
    other.add_(1)


def shared_memory(victim):
    victim.large.share_memory_()
    victim.large.data.add_(1)


def grown(victim):
    victim.keep.append(victim.large.detach().clone())
    victim.large.data.resize_(2 * NBYTES // 4)
    victim.large.data.zero_()
    victim.large.data.resize_(NBYTES // 4)


def read_from_file(victim):
    with open("/dev/zero", "rb", buffering=0) as zero:
        zero.readinto((ctypes.c_char * 4096).from_address(victim.middle))


def received(victim):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff" * 4096)
        ours.recv_into((ctypes.c_char * 4096).from_address(victim.middle), 4096, socket.MSG_WAITALL)


def proc_self_mem(victim):
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(victim.middle)
        memory.write(b"\xff" * 64)


_POKE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]
data = ctypes.create_string_buffer(b"\\xff" * 64, 64)
ours, theirs = Vec(ctypes.addressof(data), 64), Vec(int(sys.argv[2]), 64)
sys.exit(libc.process_vm_writev(int(sys.argv[1]), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) != 64)
"""


def another_process(victim):
    """As a debugger would."""
    _libc.prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER_ANY, where Yama asks for it
    poke = [sys.executable, "-c", _POKE, str(os.getpid()), str(victim.middle)]
    pythons.run(poke, check=False, capture_output=True, timeout=120)


def dont_need(victim):
    _libc.madvise(ctypes.c_void_p(victim.middle), ctypes.c_size_t(4096), mmap.MADV_DONTNEED)


def dont_need_whole_unit(victim):
    start = (victim.address + (4 << 20)) // (2 << 20) * (2 << 20)
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(2 << 20), mmap.MADV_DONTNEED)


def mapped_over(victim):
    _libc.mmap(
        ctypes.c_void_p(victim.middle), ctypes.c_size_t(1 << 20), 3,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, ctypes.c_long(0),
    )  # fmt: skip


def remapped(victim):
    """The pages go elsewhere, and are written there; what is left reads as zeros."""
    moved = _libc.mremap(
        ctypes.c_void_p(victim.middle), ctypes.c_size_t(1 << 20), ctypes.c_size_t(1 << 20),
        _MREMAP_MAYMOVE | _MREMAP_DONTUNMAP, None,
    )  # fmt: skip
    if moved not in (None, ctypes.c_void_p(-1).value):
        ctypes.memset(moved, 0xFF, 1 << 20)
        _libc.munmap(ctypes.c_void_p(moved), ctypes.c_size_t(1 << 20))


def protected_and_back(victim):
    """mprotect to read-only, and back, with a write after it."""
    for rights in (1, 3):
        _libc.mprotect(ctypes.c_void_p(victim.middle), ctypes.c_size_t(4096), rights)
    ctypes.memset(victim.middle, 0xFF, 64)


def fork_and_child_writes(victim):
    child = os.fork()
    if not child:
        ctypes.memset(victim.address, 0xFF, NBYTES)
        os._exit(0)
    os.waitpid(child, 0)


def fork_and_parent_writes(victim):
    ready, go = os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    ctypes.memset(victim.middle, 0xFF, 64)
    os.close(go)
    os.waitpid(child, 0)


def split_by_huge_page_advice(victim):
    """The pages become small ones, which says nothing about bytes; then one is written."""
    _libc.madvise(ctypes.c_void_p(victim.middle), ctypes.c_size_t(1 << 20), mmap.MADV_NOHUGEPAGE)
    _libc.madvise(ctypes.c_void_p(victim.middle), ctypes.c_size_t(4096), 21)  # MADV_PAGEOUT
    ctypes.memset(victim.middle, 0xFF, 1)


def second_mapping(victim):
    """Of shared memory that another process, or another address, may write."""
    ctypes.memset(victim.middle, 0xFF, 64)


MAPPED = {dont_need, dont_need_whole_unit, mapped_over, remapped, protected_and_back, split_by_huge_page_advice}
SHARED = {second_mapping}
# What these do leaves the bytes that were saved where they were, or is another process's own.
NO_HARM = {other_memory, other_memory_and_free, shared_memory, fork_and_child_writes, second_mapping}
EITHER = {grown}  # malloc may keep the old memory, or give it back
WRITERS = [
    in_place, one_element, data_copy, average_in_and_back, same_bits_again, other_memory, other_memory_and_free,
    foreach, unattached_fused, unattached_foreach, numpy, numpy_alias, dlpack, memory_view, thread, pool, by_ctypes,
    load_state_dict, sharpness_ascent, adapter_merge, exchange, shared_memory, grown, read_from_file, received,
    proc_self_mem, another_process, dont_need, dont_need_whole_unit, mapped_over, remapped, protected_and_back,
    fork_and_child_writes, fork_and_parent_writes, split_by_huge_page_advice, second_mapping,
]  # fmt: skip


def memory_of(writer):
    """The kind of memory that it needs."""
    return "mmap" if writer in MAPPED else "shared" if writer in SHARED else "malloc"
