"""What serves a model on a CPU, chosen by measuring on this machine, once for all starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.config.setting_types import Quantization
from engine.execution.cpu_threads import choose_num_threads, most_threads
from engine.execution.measurements import remembered
from engine.models.causal_lm import CausalLM
from engine.models.process_weights import (
    GemmChoice,
    can_choose,
    measure_gemms,
    projection_shapes,
)


def set_num_threads(subject: object, run_step: Callable[[], None]) -> int:
    """Choose and set the number of threads of torch's operations; return it.

    Args:
        subject: the model and the settings of the step, distinct by `repr`.
        run_step: runs a typical step.
    """
    most = most_threads()
    measure = partial(choose_num_threads, most, run_step)
    num_threads = remembered(("threads", most, subject), measure, int)
    torch.set_num_threads(num_threads)
    return num_threads


def is_own_gemm_faster(
    model: CausalLM,
    dtype: torch.dtype,
    quantization: Quantization | None,
    on_progress: Callable[[str], None],
) -> bool:
    """Return whether our GEMM serves `model`, not oneDNN's.

    Args:
        model: before its weights are processed, which may be on any device.
        on_progress: called with the measurements, if there is something to choose.
    """
    int8 = quantization == "int8"
    shapes = projection_shapes(model)
    if quantization == "int4" or not can_choose(shapes, dtype, int8=int8):
        return True
    subject = ("gemm", sorted(shapes.items(), key=repr), dtype, int8, torch.get_num_threads())
    measure = partial(measure_gemms, shapes, dtype, int8=int8)
    choice = remembered(subject, measure, GemmChoice)
    on_progress(choice.summary())
    return choice.own_gemm
