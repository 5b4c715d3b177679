"""Turns of conversations: what is computed again, and the command."""

from pathlib import Path

import pytest

from engine.bench.turns import LeastRecentlyUsed, main, run_turns
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose layers keep states."""
    path = tmp_path_factory.mktemp("hybrid")
    architecture, fields = FAMILIES["lfm2"]
    changes = {"vocab_size": 400, "max_position_embeddings": 8192}
    write_checkpoint(path, architecture, **{**fields, **changes})
    return save_tokenizer(byte_level_tokenizer(), path)


def test_a_turn_with_states_computes_little_again(hybrid: Path) -> None:
    turns = run_turns(
        {"model": str(hybrid), "device": "null:0", "max_num_seqs": 4},
        conversations=4,
        turns=4,
        strips_answers=False,
    )
    for turn in turns:
        assert 0 <= turn.num_recomputed <= 4 * 63
        assert turn.num_hits >= 0.95 * turn.num_kv


def test_the_command_compares_evictions(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(hybrid), "--turns", "2", "--conversations", "3", "--checkpoints", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "GreedyDual turn 1",
        "GreedyDual turn 2",
        "LRU turn 1",
        "LRU turn 2",
    ]


def test_the_least_recently_used_checkpoint_goes_first() -> None:
    pool = LeastRecentlyUsed(3)
    for name, num_tokens in ((b"a", 1000), (b"b", 1), (b"c", 1)):
        taken = pool.allocate(1)
        assert taken is not None
        pool.add_checkpoint(taken[0], name, num_tokens)
    assert pool.find(b"a") is None
