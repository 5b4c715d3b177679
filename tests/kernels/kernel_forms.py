"""The forms in which kernels are launched: each is compiled on its own on a GPU.

A form is a kernel with its constants, options, dtypes, and what Triton specialises on: integers
that are 1 or multiples of 16, pointers that are aligned to 16 bytes. Under the interpreter forms
are found as Triton finds them for a GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

import kernels
from kernels import device

Form = tuple[Any, ...]

_JIT = InterpretedFunction if device.INTERPRETED else JITFunction


@contextmanager
def recorded_forms() -> Iterator[dict[Form, str]]:
    """Collect the forms that are launched in the block, with a text that describes each."""
    found: dict[Form, str] = {}
    run = _JIT.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        names, binder = _binder(self)
        _, specialization, options = binder(*args, **kwargs)
        options = tuple(sorted(options.items()))
        form = (_name(self.fn), tuple(map(tuple, specialization)), options)
        text = ", ".join(
            f"{name}={value}" for name, value in zip(names, specialization, strict=True)
        )
        found.setdefault(form, f"{_name(self.fn)}: {text}, {options}")
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with mock.patch.object(_JIT, "run", record):
        yield found


def launched_kernels() -> set[str]:
    """Return the names of all kernels of this project that are launched from the host."""
    # Functions that kernels call have other names.
    return {_name(kernel.fn) for kernel in _all_kernels() if kernel.__name__.endswith("kernel")}


def _all_kernels() -> list[Any]:
    names = [each.name for each in pkgutil.walk_packages(kernels.__path__, "kernels.")]
    modules = [importlib.import_module(n) for n in names if ".bench" not in n and ".cpu" not in n]
    values = [value for module in modules for value in vars(module).values()]
    return [value for value in values if isinstance(value, _JIT)]


def _name(function: Any) -> str:
    return f"{function.__module__.removeprefix('kernels.')}.{function.__name__}"


@cache
def _binder(kernel: Any) -> tuple[list[str], Any]:
    """Return the names of the parameters, and what Triton calls to find the specialisation."""
    if device.INTERPRETED:
        jit = JITFunction(kernel.fn, **kernel.kwargs)
        target = GPUTarget("cuda", 90, 32)
    else:
        jit, target = kernel, triton.runtime.driver.active.get_current_target()
    backend = make_backend(target)
    binder = create_function_from_signature(jit.signature, jit.params, backend)
    return list(jit.signature.parameters), binder
