import pytest
import torch

from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.slot_writes import SlotWrites
from kernels.step.step_inputs import StepInputs, prepare_inputs
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call
from tests.kernels.slot_cases import admit

META = torch.device("meta")


def seq_slot_tables(max_model_len: int, block_size: int) -> SeqSlotTables:
    return SeqSlotTables.allocate(
        256,
        max_model_len=max_model_len,
        max_blocks=-(-max_model_len // block_size),
        max_stop_token_ids=8,
        max_biases=3,
        vocab_size=50,
        device=META,
    )


@each_gpu
@pytest.mark.parametrize(("block_size", "max_model_len"), [(16, 131072), (64, 32771)])
def test_steps(block_size: int, max_model_len: int, gpu: str) -> None:
    tables = seq_slot_tables(max_model_len, block_size)
    slots = torch.empty(256, dtype=torch.int32, device=META)
    query_start_loc = torch.empty(257, dtype=torch.int32, device=META)
    check(compile_call(gpu, prepare_inputs, tables, slots, query_start_loc, 8192, block_size))


def test_every_number_of_rows_and_tokens_runs_the_same_code() -> None:
    """Otherwise each new batch size would recompile."""
    tables = seq_slot_tables(4096, 16)
    codes = set()
    for num_rows, num_tokens in ((1, 1), (1, 17), (16, 16), (7, 1024), (256, 999)):
        both = torch.empty(2 * num_rows + 1, dtype=torch.int32, device=META)
        slots, query_start_loc = both[:num_rows], both[num_rows:]
        out = StepInputs.allocate(num_rows, num_tokens, max_blocks=256, device=META)
        arguments = (tables, slots, query_start_loc, num_tokens, 16)
        (kernel,) = compile_call("sm_90", prepare_inputs, *arguments, out=out)
        codes.add(kernel.cubin)
    assert len(codes) == 1


@each_gpu
def test_writes_to_the_tables(gpu: str) -> None:
    writes = SlotWrites(seq_slot_tables(4096, 16))
    admit(
        writes,
        3,
        token_ids=range(1500),
        num_prompt_tokens=1500,
        num_computed_tokens=64,
        min_tokens=0,
        max_tokens=100,
        stop_token_ids=[2],
        block_ids=range(1, 96),
        width=8,
    )
    check(compile_call(gpu, writes.apply))
