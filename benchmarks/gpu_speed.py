"""Decode bandwidth and prefill FLOP/s of a GPU bundle on the device here, beside torch's own kernels in CUDA graphs.

    python benchmarks/gpu_speed.py CONFIG.json --target h200-fp8 [--num-layers 8] [--batches 1,16] [--context 1024] [--json FILE]

The model has the shapes of CONFIG with random weights. Every figure is a share of what the device itself does in the same run: copying
memory with torch, and multiplying large matrices with torch in the same number format. The control is the same model written with
torch: `torch._scaled_mm` or `torch.matmul`, `scaled_dot_product_attention`, decode steps captured in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llmc
import numpy as np
import torch
from llmc.runtime.block_pool import blocks_for
from llmc.runtime.executor import StepBatch
from torch.nn import functional

REPEATS = 5


@dataclass
class Row:
    """One measurement: `share` of the device's measured bandwidth (decode) or matrix rate (prefill)."""

    contender: str
    work: str
    seconds: float
    share: float


def device_seconds(function: Callable[[], object], count: int = 20) -> float:
    """Median seconds of one call on the device, over `REPEATS` runs of `count` calls."""
    function()
    torch.cuda.synchronize()
    runs = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            function()
        end.record()
        torch.cuda.synchronize()
        runs.append(start.elapsed_time(end) / 1e3 / count)
    return statistics.median(runs)


def copy_bandwidth() -> float:
    """Bytes a second of copying 2 GiB, reading and writing counted."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / device_seconds(lambda: target.copy_(source))


def matrix_rate(scheme: str, size: int = 8192) -> float:
    """Operations a second of a large product in the scheme's input format; int4 multiplies in bf16."""
    left, right = random_operand(size, size, scheme), random_operand(size, size, scheme)
    return 2 * size**3 / device_seconds(lambda: product(left, right, scheme))


def random_operand(rows: int, columns: int, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and a scale for each row."""
    values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(rows, 1, device="cuda")
    if scheme == "fp8":
        return values.to(torch.float8_e4m3fn), scale
    if scheme == "int8":
        return (values * 30).to(torch.int8), scale
    return values, scale


def product(x: tuple[torch.Tensor, torch.Tensor], w: tuple[torch.Tensor, torch.Tensor], scheme: str) -> torch.Tensor:
    """`x @ w^T` in torch's fastest kernel for the scheme."""
    if scheme == "fp8":
        return torch._scaled_mm(x[0], w[0].t(), scale_a=x[1], scale_b=w[1].t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    if scheme == "int8":
        return torch._int_mm(x[0], w[0].t())
    return x[0] @ w[0].t()


class Control:
    """A Llama-type model in torch: its own kernels, weights of random numbers, contiguous KV."""

    def __init__(self, config: dict[str, Any], scheme: str, batch: int, context: int) -> None:
        self.config, self.scheme = config, scheme
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or hidden // self.heads
        widths = {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, hidden),
            "out": (hidden, self.heads * self.dim),
            "up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        self.layers = [
            {name: random_operand(*shape, scheme) for name, shape in widths.items()} for _ in range(config["num_hidden_layers"])
        ]
        self.head = random_operand(config["vocab_size"], hidden, "bf16")
        self.norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        shape = (config["num_hidden_layers"], 2, batch, self.kv_heads, context, self.dim)
        self.cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def linear(self, x: torch.Tensor, w: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """A product with the input quantised for each token, as the scheme says."""
        if self.scheme == "fp8":
            scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-6) / 448
            return product(((x / scale).to(torch.float8_e4m3fn), scale), w, "fp8")
        return x @ w[0].t()

    def forward(self, x: torch.Tensor, cached: bool) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` of one prompt, or of one token of each sequence with the cache as its context."""
        tokens = x.shape[0]
        batch, length = (tokens, 1) if cached else (1, tokens)
        for index, layer in enumerate(self.layers):
            normed = functional.rms_norm(x, self.norm.shape, self.norm)
            qkv = self.linear(normed, layer["qkv"]).view(batch, length, -1, self.dim).transpose(1, 2)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            if cached:
                k, v = self.cache[index]
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=not cached, enable_gqa=True)
            x = x + self.linear(attended.transpose(1, 2).reshape(tokens, -1), layer["out"])
            gate, up = self.linear(functional.rms_norm(x, self.norm.shape, self.norm), layer["up"]).chunk(2, -1)
            x = x + self.linear(functional.silu(gate) * up, layer["down"])
        last = x if cached else x[-1:]
        return functional.rms_norm(last, self.norm.shape, self.norm) @ self.head[0].t()

    def decode_seconds(self, batch: int) -> float:
        """Of one captured step."""
        x = torch.randn(batch, self.config["hidden_size"], device="cuda", dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            self.forward(x, True)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.forward(x, True)
        return device_seconds(graph.replay)

    def prefill_seconds(self, tokens: int) -> float:
        """Of one prompt."""
        x = torch.randn(tokens, self.config["hidden_size"], device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            return device_seconds(lambda: self.forward(x, False), count=5)


def wall_seconds(function: Callable[[], object], count: int) -> float:
    """Median seconds of one call, host and device, over `REPEATS` runs of `count` calls that end in a synchronisation."""
    runs = []
    for _ in range(REPEATS + 1):  # the first one captures graphs
        start = time.perf_counter()
        for _ in range(count):
            function()
        torch.cuda.synchronize()
        runs.append((time.perf_counter() - start) / count)
    return statistics.median(runs[1:])


def measure_bundle(engine: llmc.runtime.Engine, batch: int, context: int, prompt: int) -> tuple[float, float, float]:
    """Seconds of a decode step on the device alone, of one with sampling and the way back, and of a prompt."""
    executor = engine.executor
    blocks = [engine.pool.allocate(blocks_for(context + 1)) for _ in range(batch)]
    step = engine.scheduler.max_tokens
    ids = np.random.default_rng(0).integers(0, 1000, context).tolist()
    for table in blocks:
        for start in range(0, context, step):
            chunk = ids[start : start + step]
            executor.step(StepBatch.build([(chunk, start, table)], [len(chunk) - 1])).numpy()
    decode = StepBatch.build([([1], context, table) for table in blocks], range(batch))
    greedy = np.zeros(batch, llmc.runtime.executor.SAMPLING_DTYPE)
    device = wall_seconds(lambda: executor.step(decode), 50)
    whole = wall_seconds(lambda: executor.sample(executor.step(decode), greedy), 50)
    for table in blocks:
        engine.pool.release(table)
    table = engine.pool.allocate(blocks_for(prompt))
    batch_of_one = StepBatch.build([(np.resize(ids, prompt).tolist(), 0, table)], [prompt - 1])
    prefill = wall_seconds(lambda: executor.step(batch_of_one), 5)
    engine.pool.release(table)
    return device, whole, prefill


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--target", default="h200-fp8")
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    config["num_hidden_layers"] = options.num_layers
    scheme = options.target.partition("-")[2]
    bandwidth, rate = copy_bandwidth(), matrix_rate("bf16" if scheme == "int4" else scheme)
    print(
        f"{torch.cuda.get_device_name()}: copies {bandwidth / 1e12:.2f} TB/s, multiplies {rate / 1e12:.0f} T operations/s ({scheme})"
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "model.llmc"
        report = llmc.compile(options.config, target=options.target, num_layers=options.num_layers, output=bundle)
        target = report.targets[options.target]
        vectors = target.weight_bytes.get("vectors", 0)
        head = 2 * config["vocab_size"] * config["hidden_size"]
        embedding = 0 if config.get("tie_word_embeddings") else head
        read = sum(target.weight_bytes.values()) - embedding  # a step reads all of the head, and one row of the embedding
        layer_values = report.num_parameters - (head + embedding) // 2 - vectors // 4
        with llmc.load(bundle, executor="cuda", max_num_seqs=64) as engine:
            print(engine.target_choice)
            for batch in map(int, options.batches.split(",")):
                seconds, whole, prefill = measure_bundle(engine, batch, options.context, options.prompt)
                moved = read + batch * options.context * target.kv_bytes_per_token
                rows.append(Row("llmc", f"decode, batch {batch}", seconds, moved / seconds / bandwidth))
                rows.append(Row("llmc, with sampling", f"decode, batch {batch}", whole, moved / whole / bandwidth))
            operations = 2 * layer_values * options.prompt
            rows.append(Row("llmc", f"prefill, {options.prompt} tokens", prefill, operations / prefill / rate))
    if scheme in ("fp8", "bf16"):
        for batch in map(int, options.batches.split(",")):
            control = Control(config, scheme, batch, options.context)
            seconds = control.decode_seconds(batch)
            moved = read + batch * options.context * target.kv_bytes_per_token
            rows.append(Row("torch, CUDA graph", f"decode, batch {batch}", seconds, moved / seconds / bandwidth))
        seconds = control.prefill_seconds(options.prompt)
        rows.append(Row("torch", f"prefill, {options.prompt} tokens", seconds, operations / seconds / rate))
    for row in rows:
        print(f"{row.work:24} {row.contender:22} {row.seconds * 1e3:9.3f} ms   {row.share:6.1%} of the device")
    if options.json:
        figures = {"bandwidth_bytes_per_s": bandwidth, "matrix_ops_per_s": rate, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
