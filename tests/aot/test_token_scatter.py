import pytest
import torch

from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.token_scatter import scatter_tokens
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call

META = torch.device("meta")


@each_gpu
@pytest.mark.parametrize("max_stop_token_ids", [8, 1000])
def test_tokens(max_stop_token_ids: int, gpu: str) -> None:
    tables = SeqSlotTables.allocate(
        256,
        max_model_len=32771,
        max_blocks=2049,
        max_stop_token_ids=max_stop_token_ids,
        max_biases=3,
        vocab_size=50,
        device=META,
    )
    slots = torch.empty(256, dtype=torch.int32, device=META)
    token_ids = torch.empty(256, dtype=torch.int64, device=META)
    check(compile_call(gpu, scatter_tokens, tables, slots, token_ids))
