"""Speed of a compiled model beside llama.cpp and Hugging Face on the same weights, interleaved in one run, with the machine's floors.

    python benchmarks/speed.py MODEL [--prompt 512] [--generate 64] [--rounds 5] [--threads 2] [--json FILE]

Every round times every contender once, so that a noisy machine is unkind to all alike; the table shows medians, and ratios to llama.cpp
(or, without it, to HF). Floors: a decoded token must read all weights once, a prompt token needs two operations for each layer weight.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import llmc
import numpy as np
import torch
from llmc.codegen.cpu.toolchain import compile_library, find_compiler
from measuring import load_reference
from texts import ENGLISH

SCHEMES = ("bf16", "int8", "int4-g32")


@dataclass
class Contender:
    """`prefill(ids)` processes a prompt; `decode(ids, n)` continues it by n tokens and returns the seconds those took."""

    name: str
    weight_bytes: int
    prefill: Callable[[list[int]], float]
    decode: Callable[[list[int], int], float]
    prefill_rates: list[float] = field(default_factory=list)
    decode_rates: list[float] = field(default_factory=list)


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def llmc_contender(name: str, bundle: Path, weight_bytes: int, threads: int) -> Contender:
    """A loaded bundle; rates come from the engine's own per-request statistics."""
    engine = llmc.load(bundle, num_threads=threads)

    def params(count: int) -> llmc.SamplingParams:
        return llmc.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)

    def decode(ids: list[int], count: int) -> float:
        stats = engine.generate(ids, params(count + 1)).stats
        return (stats.e2e_ms - stats.ttft_ms) / 1e3

    return Contender(name, weight_bytes, lambda ids: engine.generate(ids, params(1)).stats.ttft_ms / 1e3, decode)


def llama_cpp_contender(gguf: Path, threads: int, context: int) -> Contender:
    """The GGUF file in llama.cpp, with a greedy choice of each token as the engine makes it."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(gguf), n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, logits_all=False, verbose=False
    )

    def prefill(ids: list[int]) -> float:
        model.reset()
        return timed(lambda: (model.eval(ids), model.sample(temp=0.0)))

    def decode(ids: list[int], count: int) -> float:
        prefill(ids)
        token = model.sample(temp=0.0)

        def run() -> None:
            nonlocal token
            for _ in range(count):
                model.eval([token])
                token = model.sample(temp=0.0)

        return timed(run)

    return Contender(f"llama.cpp {gguf.stem[-12:]}", gguf.stat().st_size, prefill, decode)


def hugging_face_contender(model: str) -> Contender:
    """Transformers in bfloat16 with its dynamic cache; logits of the last position only."""
    reference = load_reference(model, torch.bfloat16)

    @torch.no_grad()
    def forward(ids: list[int], cache: object = None) -> object:
        return reference(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)

    def decode(ids: list[int], count: int) -> float:
        out = forward(ids)

        def run() -> None:
            nonlocal out
            for _ in range(count):
                out = forward([int(out.logits[0, -1].argmax())], out.past_key_values)

        return timed(run)

    return Contender(
        "HF bfloat16", 2 * sum(p.numel() for p in reference.parameters()), lambda ids: timed(lambda: forward(ids)), decode
    )


class Floors:
    """What the machine can do: bytes a second of reading, bfloat16 operations a second of a matrix product; the best seen so far."""

    def __init__(self, threads: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            compiler = find_compiler()
            level = "avx2" if "avx2" in compiler.levels and torch.cpu._is_avx2_supported() else "portable"
            library = compile_library(
                Path(__file__).parent / "read_probe.cpp", level, Path(name) / "probe.so", compiler=compiler
            )
            self._read = ctypes.CDLL(str(library)).read_all
        self._words = np.ones(64 << 20, dtype=np.uint64)
        self._threads = threads
        self._matrix = torch.randn(2048, 2048).bfloat16()
        self.bandwidth = self.rate = 0.0
        for _ in range(5):
            self.measure()

    def measure(self) -> None:
        """Once more; called in every round, as the machine is not equally free all the time."""
        words = self._words.ctypes.data_as(ctypes.c_void_p)
        seconds = timed(lambda: self._read(words, ctypes.c_int64(self._words.size), ctypes.c_int(self._threads)))
        self.bandwidth = max(self.bandwidth, self._words.nbytes / seconds)
        self.rate = max(self.rate, 2 * len(self._matrix) ** 3 / timed(lambda: self._matrix @ self._matrix))


_START = """
import sys, time
import llmc
engine = llmc.load(sys.argv[1], num_threads=int(sys.argv[2]))
next(iter(engine.stream([5] * 64, llmc.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))))
print(time.time())
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmRSS")))
"""


def start_up(bundle: Path, threads: int) -> tuple[float, int]:
    """Seconds from starting a Python process to the first of its tokens for a 64-token prompt, and its resident bytes then."""
    begin = time.time()
    output = subprocess.run(
        [sys.executable, "-c", _START, str(bundle), str(threads)], capture_output=True, text=True, check=True
    ).stdout.split()
    return float(output[0]) - begin, int(output[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    floors = Floors(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        contenders, startups, embedding = [], {}, 0
        for scheme in arguments.schemes.split(","):
            bundle = Path(name) / f"{scheme}.llmc"
            report = llmc.compile(
                arguments.model, target="cpu-int8", quantization=scheme, cpu_levels=("native",), output=bundle
            )
            weight_bytes = sum(report.weight_files.values())
            contenders.append(llmc_contender(f"llmc {scheme}", bundle, weight_bytes, arguments.threads))
            startups[scheme] = (*min(start_up(bundle, arguments.threads) for _ in range(3)), weight_bytes)
        contenders.append(hugging_face_contender(arguments.model))
        try:
            if arguments.model.endswith(".gguf"):
                context = arguments.prompt + arguments.generate + 16
                contenders.append(llama_cpp_contender(Path(arguments.model), arguments.threads, context))
        except ModuleNotFoundError:
            print("llama-cpp-python is not installed: no llama.cpp row", file=sys.stderr)
        with llmc.load(Path(name) / f"{arguments.schemes.split(',')[0]}.llmc") as engine:
            text = engine.tokenizer.encode(ENGLISH)
            config = json.loads((Path(name) / f"{arguments.schemes.split(',')[0]}.llmc" / "config.json").read_text())
        embedding = config["vocab_size"] * config["hidden_size"]
        ids = (text * (1 + arguments.prompt // len(text)))[: arguments.prompt]
        for round_number in range(arguments.rounds + 1):
            floors.measure()
            for contender in contenders:
                prefill = arguments.prompt / contender.prefill(ids)
                decode = arguments.generate / contender.decode(ids[:16], arguments.generate)
                if round_number:  # the first warms caches up
                    contender.prefill_rates.append(prefill)
                    contender.decode_rates.append(decode)
    _print(contenders, startups, floors, report.num_parameters - embedding, arguments)


def _print(
    contenders: list[Contender],
    startups: dict[str, tuple[float, int, int]],
    floors: Floors,
    layer_parameters: int,
    arguments: argparse.Namespace,
) -> None:
    control, bandwidth, rate = contenders[-1], floors.bandwidth, floors.rate
    print(f"{arguments.threads} threads; reads {bandwidth / 1e9:.1f} GB/s; bfloat16 products {rate / 1e12:.2f} TFLOP/s")
    print(f"prompt {arguments.prompt} tokens, {arguments.generate} generated; medians of {arguments.rounds} interleaved rounds")
    print(
        f"{'':22}{'prefill tok/s':>14}{'x control':>10}{'of peak':>9}{'decode tok/s':>14}{'x control':>10}{'GB/s':>7}{'of floor':>9}"
    )
    rows = []
    for c in contenders:
        prefill, decode = statistics.median(c.prefill_rates), statistics.median(c.decode_rates)
        pairs = zip(c.prefill_rates, control.prefill_rates, strict=True), zip(c.decode_rates, control.decode_rates, strict=True)
        ratios = [statistics.median(a / b for a, b in pair) for pair in pairs]
        gbps = decode * c.weight_bytes / 1e9
        peak = prefill * 2 * layer_parameters / rate
        print(
            f"{c.name:22}{prefill:14.0f}{ratios[0]:10.2f}{peak:9.0%}{decode:14.1f}{ratios[1]:10.2f}{gbps:7.1f}{gbps * 1e9 / bandwidth:9.0%}"
        )
        rows.append(
            {
                "name": c.name,
                "weight_bytes": c.weight_bytes,
                "prefill_tokens_per_s": prefill,
                "prefill_over_control": ratios[0],
                "decode_tokens_per_s": decode,
                "decode_over_control": ratios[1],
                "decode_bytes_per_s": gbps * 1e9,
            }
        )
    print(f"control: {control.name}")
    for scheme, (seconds, rss, weights) in startups.items():
        print(
            f"start of llmc {scheme}: {seconds:.2f} s to the first token, resident {rss / 1e6:.0f} MB = {rss / weights:.2f}x weights"
        )
    if arguments.json:
        machine = {"bandwidth_bytes_per_s": bandwidth, "bf16_ops_per_s": rate, "threads": arguments.threads}
        start = {k: {"seconds": v[0], "resident_bytes": v[1], "weight_bytes": v[2]} for k, v in startups.items()}
        arguments.json.write_text(json.dumps({"machine": machine, "contenders": rows, "start": start}, indent=2) + "\n")


if __name__ == "__main__":
    main()
