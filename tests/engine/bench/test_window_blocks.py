import pytest

from engine.bench import window_blocks
from engine.models.kv_groups import KVGroups, group_layers


def test_a_window_bounds_the_blocks_and_a_single_group_holds_all() -> None:
    model = window_blocks.Model("", 6, 2, 16, 64, 3)
    assert model.windows == [64, 64, None] * 2
    groups = group_layers(model.windows, 2048)
    assert window_blocks.most_blocks(KVGroups.single(6), 2048, 128) == (128, 128)
    most, decoding = window_blocks.most_blocks(groups, 2048, 128)
    assert 128 + 2 * 4 <= decoding <= 128 + 2 * 6
    assert decoding < most <= 128 + 2 * 14
    assert model.block_bytes(groups) == 2 * 2 * 2 * 16 * 2 * 16


def test_the_command_prints_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    window_blocks.main(["--tokens", "8192", "--gib", "10"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        model.name for model in window_blocks.MODELS
    ]
