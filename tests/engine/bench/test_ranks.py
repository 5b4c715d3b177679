"""The tables of ranks on a CPU, and what those of GPUs do on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.bench import ranks
from engine.bench.ranks import Sums, crossover, group_sums, main, parity, rank_steps, steps, wire
from tests.factories.checkpoints import write_checkpoint
from tests.factories.forms import in_panels
from tests.factories.tokenizers import byte_level_tokenizer


def test_wire_table_has_the_bytes_and_times_of_a_step() -> None:
    cells = [cell.strip() for cell in wire().splitlines()[-1].split("|")[1:-1]]
    assert cells[0] == "256"
    assert 3000 < int(cells[1]) < 5000
    assert all(float(cell) > 0 for cell in cells[2:])


@pytest.mark.skipif(not in_panels(torch.bfloat16), reason="the CPU kernels are not built")
def test_steps_table_has_a_row_for_each_batch_and_the_prompt() -> None:
    lines = steps("tiny", (1, 2), 16, 2).splitlines()
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert names == ["decode, 1 rows", "decode, 2 rows", "prompt of 16"]


def test_sums_of_a_group_are_right_and_timed_by_size() -> None:
    text, wrong = group_sums(2, "cpu", [2, 2**13, 2**15])
    lines = text.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["2", "8,192", "32,768"]
    assert all(float(line.split("|")[2]) > 0 for line in lines[2:5])
    assert lines[-1].startswith("No symmetric memory")
    assert wrong == []


def test_crossover_of_sums_is_where_another_is_faster_for_the_first_time() -> None:
    times = {
        2**13: (9, 2, 3),
        2**16: (9, 3, 4),
        2**18: (9, 5, 4),
        2**20: (8, 12, 9),
        2**21: (9, 1, 1),
    }
    names = ("NCCL", "one shot", "two shots")
    found = [Sums(key, dict(zip(names, each, strict=True)), []) for key, each in times.items()]
    text = crossover(found, 4)
    assert text == (
        "One shot was the fastest up to 65,536 bytes and serves up to 262,144; "
        "two shots up to 262,144, and serve up to 1,048,576."
    )


@pytest.mark.large
def test_steps_of_two_ranks_stand_beside_their_floors() -> None:
    lines = rank_steps("tiny", [2], [1, 2], "cpu").splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["1 rows", "2 rows"]
    assert all(line.count("(") == 2 for line in lines[2:])


@pytest.mark.large
def test_parity_of_two_ranks_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vocab_size=2000, max_position_embeddings=512)
    byte_level_tokenizer().save_pretrained(tmp_path)
    assert parity([2], "cpu", str(tmp_path)) == ("Tokens of 2 ranks: those of one process.", [])


def test_parity_of_ranks_that_give_other_tokens_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {1: "a", 2: "a", 4: "b"}
    monkeypatch.setattr(
        ranks, "_processes", lambda call, _, settings: [sizes[settings["tensor_parallel_size"]]]
    )
    assert parity([2, 4], "cpu", "")[1] == ["4 ranks give other tokens than one"]


def test_exit_status_is_1_if_a_part_is_wrong_or_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> tuple[str, list[str]]:
        raise RuntimeError("the third")

    parts = [lambda: ("a table", []), lambda: ("another", ["the second"]), fails]
    monkeypatch.setattr(ranks, "_parts", lambda count, options: parts)
    assert main([]) == 1
    written = capsys.readouterr().out
    assert written.endswith("WRONG: the second\nWRONG: RuntimeError: the third\n")
    if torch.cuda.device_count() < 2:
        assert "GPUs are here: nothing of what two need is tested" in written
    monkeypatch.setattr(ranks, "_parts", lambda count, options: parts[:1])
    assert main([]) == 0
