# ruff: noqa: ANN001, ANN202 - Triton gives the parameters of its functions their types.
import pytest
import torch
import triton
import triton.language as tl

from kernels.sampling import philox
from tests.kernels.support import DEVICE

SEEDS = [0, 1, 2**32, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
POSITIONS = [0, 1, 2**32 + 7]

# Known-answer tests of the authors' Random123: counter, key, words.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@triton.jit
def _fill(
    words_ptr, tile_ptr, token_ptr, seeds_ptr, positions_ptr, R: tl.constexpr, C: tl.constexpr
):
    i_row = tl.program_id(0)
    seed, position = tl.load(seeds_ptr + i_row), tl.load(positions_ptr + i_row)
    o_quads = tl.arange(0, R)[:, None] * (C // 4) + tl.arange(0, C // 4)[None, :]
    words = philox.random_words(seed, position, o_quads)
    for i in tl.static_range(4):
        tl.store(words_ptr + i_row * R * C + 4 * o_quads + i, words[i].to(tl.int64))
    o = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    b_tile = philox.tile_exponentials(seed, position, o_quads, R, C)
    tl.store(tile_ptr + i_row * R * C + o, b_tile)
    tl.store(token_ptr + i_row * R * C + o, philox.token_exponentials(seed, position, o))


def _tensors(words: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in words.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_reference_gives_the_known_answers(counter: str, key: str, answer: str) -> None:
    words = philox.philox_reference(_tensors(counter), _tensors(key))
    assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_the_words_of_a_request_are_philox_of_its_seed_and_position() -> None:
    seed, position, token = 0x1122334455667788, 0x99AABBCCDD, 1234
    row = philox.words_reference(torch.tensor([seed]), torch.tensor([position]), token + 1)[0]
    counter = (token // 4, 0, position & 0xFFFFFFFF, position >> 32)
    words = philox.philox_reference(
        tuple(map(torch.tensor, counter)),
        (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32)),
    )
    assert int(row[token]) == int(words[token % 4])


def test_the_kernel_computes_the_same_bits() -> None:
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    seeds, positions = (torch.tensor(part, device=DEVICE) for part in zip(*pairs, strict=True))
    words = torch.empty(len(pairs), 128, dtype=torch.int64, device=DEVICE)
    tile, token = (torch.empty(len(pairs), 128, device=DEVICE) for _ in range(2))
    _fill[(len(pairs),)](words, tile, token, seeds, positions, R=8, C=16)
    assert torch.equal(words, philox.words_reference(seeds, positions, 128))
    assert len(set(words.flatten().tolist())) > words.numel() - 5
    assert torch.equal(tile, token)
    expected = philox.exponentials_reference(seeds, positions, 128)
    assert ((tile / expected - 1).abs() < 2.0**-20).all()


@triton.jit
def _exponential(words_ptr, out_ptr, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out_ptr + o, philox.to_exponential(tl.load(words_ptr + o).to(tl.uint32)))


def test_the_ends_of_the_exponential() -> None:
    # Of the 2^32 words: the first, those around the end of the series, and the last.
    edges = [0, 1, 2**28 - 1, 2**28, 2**28 + 1, 2**31, 2**32 - 2**8, 2**32 - 1]
    words = torch.tensor(edges, device=DEVICE)
    out = torch.empty(len(edges), device=DEVICE)
    _exponential[(1,)](words, out, N=len(edges))
    expected = -torch.log1p(-(words.double() + 0.5) * 2.0**-32)
    assert ((out / expected - 1).abs() < 2.0**-20).all()
    assert out[0] == 2.0**-33
