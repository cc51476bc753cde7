"""What a program library exports besides the step: version, level, self-test, guarded call, and the step's checks."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def test_version_and_self_test(kernels: Any) -> None:
    assert kernels.lib.llmc_abi_version() == 2
    assert kernels.lib.llmc_self_test() == 0


def test_self_test_runs_under_the_portable_guard(kernels: Any, libraries: dict[str, Path]) -> None:
    guard = ctypes.CDLL(str(libraries["portable"])).llmc_guarded_call
    assert guard(ctypes.cast(kernels.lib.llmc_self_test, ctypes.c_void_p)) == 0


def test_guarded_call_survives_illegal_instructions(kernels: Any) -> None:
    guard = kernels.lib.llmc_guarded_call
    for _ in range(2):
        assert guard(ctypes.cast(kernels.lib.test_illegal_instruction, ctypes.c_void_p)) == -1
        assert guard(ctypes.cast(kernels.lib.test_seven, ctypes.c_void_p)) == 7


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_unguarded_illegal_instruction_still_ends_the_process(libraries: dict[str, Path]) -> None:
    code = (
        "import ctypes, sys\n"
        "lib = ctypes.CDLL(sys.argv[1])\n"
        "lib.llmc_guarded_call(ctypes.cast(lib.test_illegal_instruction, ctypes.c_void_p))\n"
        "lib.test_illegal_instruction()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(libraries["portable"])], capture_output=True)
    assert done.returncode < 0


def test_validate(kernels: Any) -> None:
    from_conftest = kernels._step.__func__.__globals__
    model_type, step_type = from_conftest["Model"], from_conftest["StepArgs"]

    def check(ids: list[int], rows: list[int], max_tokens: int = 3) -> int:
        token_ids, logit_rows = np.array(ids, np.int32), np.array(rows, np.int32)
        step = step_type(
            num_tokens=len(ids),
            num_logit_rows=len(rows),
            token_ids=token_ids.ctypes.data,
            logit_rows=logit_rows.ctypes.data,
        )
        model = model_type(max_tokens=max_tokens, num_threads=1)
        return int(kernels.lib.test_validate(ctypes.byref(model), ctypes.byref(step), 10))

    assert check([0, 9, 5], [0, 2]) == 0
    assert check([], []) == 0
    assert check([1, 2, 3, 4], [0]) == 1
    assert check([1], [0, 0, 0, 0]) == 1
    assert check([10], [0]) == 3
    assert check([-1], [0]) == 3
    assert check([1], [1]) == 3
