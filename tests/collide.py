"""Other bytes with the same XXH3-128, made at once: what any unkeyed reader takes for the bytes that were saved.

XXH3 of long inputs adds up, for each of eight lanes and sixteen stripes of 64 bytes, the words and the products of
their halves; then it scrambles. Of a lane's sixteen words twelve may be anything when the last four put both sums
right. https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import struct

import xxhash

UNIT = 1024  # bytes between two scrambles: any whole unit of a long input but its last can be replaced
_LANES, _STRIPES, _FREE = 8, 16, 12
_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
# The secret of XXH3 without a seed: a constant of the algorithm.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def forge(data: bytes, at: int, wanted: bytes) -> bytes:
    """data with a unit at ``at`` replaced by bytes of which the first 768 are wanted's; of the same XXH3-128."""
    assert at % UNIT == 0
    assert at + UNIT < len(data) - 64
    unit = _unit(data[at : at + UNIT], wanted[: _FREE * 64].ljust(_FREE * 64, b"\0"))
    forged = data[:at] + unit + data[at + UNIT :]
    assert forged != data
    assert xxhash.xxh3_128_digest(forged) == xxhash.xxh3_128_digest(data)
    return forged


def _unit(old: bytes, wanted: bytes) -> bytes:
    words = [list(struct.unpack_from("<8Q", old, 64 * stripe)) for stripe in range(_STRIPES)]
    new = [list(struct.unpack_from("<8Q", wanted, 64 * stripe)) for stripe in range(_FREE)]
    new += [[0] * _LANES for _ in range(_STRIPES - _FREE)]
    for lane in range(_LANES):
        keys = [struct.unpack_from("<Q", _SECRET, 8 * stripe + 8 * lane)[0] for stripe in range(_STRIPES)]
        free = range(_FREE)
        total = sum(words[s][lane] for s in range(_STRIPES)) - sum(new[s][lane] for s in free)
        product = sum(_product(words[s][lane] ^ keys[s]) for s in range(_STRIPES))
        product = (product - sum(_product(new[s][lane] ^ keys[s]) for s in free)) & _M64
        high, low = divmod(product, _M32)
        assert high <= _M32, "a product in four thousand million: choose other bytes"
        a = keys[12] ^ (_M32 << 32 | high)
        b = keys[13] ^ (low << 32 | 1)
        left = (total - a - b) & _M64
        # Two words whose halves multiply to nothing: one has its low half free, the other its high half.
        fixed_high, fixed_low = keys[14] & ~_M32, keys[15] & _M32
        c = fixed_high | ((left - fixed_low) & _M32)
        d = fixed_low | ((left - c - fixed_low) & _M64 & ~_M32)
        assert (c + d) & _M64 == left
        for stripe, word in zip(range(12, 16), (a, b, c, d), strict=True):
            new[stripe][lane] = word & _M64
    return b"".join(struct.pack("<8Q", *stripe) for stripe in new)


def _product(word: int) -> int:
    return (word & _M32) * (word >> 32)
