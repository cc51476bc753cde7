"""Compiles Triton kernels in a process of its own: jobs as JSON lines on stdin, results as JSON lines on stdout.

A process of its own because Triton is imported either to compile or to interpret, never both, and so that kernels build in parallel.
No GPU and no driver is touched: the architecture is given, and Triton's active driver is never asked.
"""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import Any

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel for one architecture; the results go to `output` plus a suffix for each stage that is kept."""

    source: str
    name: str
    signature: dict[str, str]
    arch: str
    warp_size: int
    num_warps: int
    num_stages: int
    output: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What Triton says of a compiled kernel; `error` is the compiler's message where it failed."""

    output: str
    shared_bytes: int = 0
    scratch_bytes: int = 0
    error: str | None = None


def main() -> None:
    """Compile until stdin ends."""
    results = os.fdopen(os.dup(1), "wb")  # what else is printed goes to stderr
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        try:
            done = _compile(job)
        except Exception as error:  # whatever the compiler raises becomes the job's answer
            text = " ".join(str(error).split()) or type(error).__name__
            done = Done(output=job.output, error=text[:2000])
        results.write(msgspec.json.encode(done) + b"\n")
        results.flush()


def _compile(job: Job) -> Done:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    where = f"{job.name}.py"
    linecache.cache[where] = (len(job.source), None, job.source.splitlines(keepends=True), where)
    scope: dict[str, Any] = {"__name__": job.name, "__file__": where}
    exec(compile(job.source, where, "exec"), scope)
    cuda = job.arch.startswith("sm_")
    target = GPUTarget("cuda", int(job.arch[3:]), 32) if cuda else GPUTarget("hip", job.arch, job.warp_size)
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(job.signature.values()) if type.startswith("*")}
    source = ASTSource(scope[job.name], job.signature, {}, aligned)
    built: Any = triton.compile(source, target=target, options={"num_warps": job.num_warps, "num_stages": job.num_stages})
    assembly = built.asm["ptx" if cuda else "amdgcn"]
    Path(f"{job.output}.bin").write_bytes(built.asm["cubin" if cuda else "hsaco"])
    Path(f"{job.output}.asm").write_text(assembly, encoding="utf-8")
    return Done(
        output=job.output,
        shared_bytes=built.metadata.shared,
        scratch_bytes=built.metadata.global_scratch_size + built.metadata.profile_scratch_size if cuda else 0,
    )


if __name__ == "__main__":
    main()
