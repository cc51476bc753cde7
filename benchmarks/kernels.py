"""Measures the CPU kernels against this machine's limits: read bandwidth, and the peak rate of the instruction used.

    python benchmarks/kernels.py [--threads N]

GEMV (one row, a decode step) is judged by bytes of weights read per second, GEMM (many rows, a prefill) by
instructions per second. Decode attention is timed for each type of keys and values. Each figure is the best of several runs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
from pathlib import Path

from llmc.codegen.cpu import toolchain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    threads: int = parser.parse_args().threads
    compiler = toolchain.find_compiler()
    source = Path(__file__).with_name("kernels.cpp")
    with tempfile.TemporaryDirectory() as folder:
        portable = toolchain.compile_library(source, "portable", Path(folder) / "portable.so", compiler=compiler)
        highest = ctypes.CDLL(str(portable)).llmc_cpu_level()
        level = [level for level in compiler.levels if list(toolchain.LEVEL_FLAGS).index(level) <= highest][-1]
        library = toolchain.compile_library(source, level, Path(folder) / "best.so", compiler=compiler)
        print(f"level {level}, {threads} threads, {compiler.version}", flush=True)
        ctypes.CDLL(str(library)).benchmark(threads)


if __name__ == "__main__":
    main()
