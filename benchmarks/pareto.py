"""Bytes against divergence: llmc's allocations under a budget beside llama.cpp's quantisations of the same weights, as a table and a plot.

    python benchmarks/pareto.py MODEL.gguf [--sizes 180,220,261,283] [--json FILE] [--plot FILE.svg]

Every model is held against the float32 one on the four texts of `texts.py`, which nothing is calibrated on; llmc is calibrated on its
built-in texts. Sizes are megabytes of weights. Decoding rates are medians of rounds in which every model takes its turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import llmc
from measuring import GGUF_TYPES, Bundle, measure, open_model, quantize_with_llama_cpp, reference_logits
from texts import ENGLISH, TOKENS, passages

SIZES = "180,220,250,261,283"
ROUNDS = 3
CONTEXT = 4096  # tokens whose KV cache a memory budget covers


def compile_sizes(model: str, sizes: list[float], folder: Path, method: str, samples: int) -> dict[str, tuple[Path, int]]:
    """A bundle for each size in megabytes, and the bytes of its weights."""
    dry = llmc.compile(model, target="cpu-int8", dry_run=True)
    cache = dry.targets["cpu-int8"].kv_bytes_per_token * CONTEXT
    found = {}
    for size in sizes:
        path = folder / f"{size:g}.llmc"
        report = llmc.compile(
            model,
            target="cpu-int8",
            method=method,
            calibration_samples=samples,
            memory_budget=int(size * 1e6) + cache,
            cpu_levels=("native",),
            output=path,
        )
        quantized = report.quantization[next(iter(report.targets))]
        assert quantized.quality is not None
        print(f"{size:g} MB: mean KL {quantized.quality.kl_mean:.5f} on held-out calibration text", flush=True)
        found[f"llmc {method} {size:g} MB"] = (path, sum(report.weight_files.values()))
    return found


def show(rows: list[dict]) -> None:
    """The table, smallest first."""
    print(f"{'':26}{'MB':>8}{'mean KL':>10}{'p95 KL':>9}{'top-1':>8}{'ppl':>8}{'flips':>7}{'tok/s':>8}")
    for row in rows:
        print(
            f"{row['name']:26}{row['bytes'] / 1e6:8.1f}{row['kl_mean']:10.5f}{row['kl_p95']:9.4f}{row['top1_agreement']:8.2%}"
            f"{row['perplexity']:8.2f}{row['flips']:7.2%}{row['decode_tokens_per_s']:8.1f}"
        )


def plot(rows: list[dict], path: Path) -> None:
    """Bytes across, divergence up (logarithmic): lower left is better."""
    import matplotlib as mpl

    mpl.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for prefix, colour, mark in (("llmc", "tab:blue", "o-"), ("llama.cpp", "tab:orange", "s--")):
        mine = [row for row in rows if row["name"].startswith(prefix)]
        axes.plot([r["bytes"] / 1e6 for r in mine], [r["kl_mean"] for r in mine], mark, color=colour, label=prefix)
        for row in mine:
            label = row["name"].removeprefix(prefix).strip()
            axes.annotate(label, (row["bytes"] / 1e6, row["kl_mean"]), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set(xlabel="weights, MB", ylabel="mean KL from float32, nats", yscale="log")
    axes.margins(x=0.08)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file in float32 or float16")
    parser.add_argument("--sizes", default=SIZES, help="megabytes of weights")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--samples", type=int, default=128, help="of the built-in texts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = [float(s) for s in arguments.sizes.split(",")]
        models = compile_sizes(arguments.model, sizes, folder, arguments.method, arguments.samples)
        for kind in GGUF_TYPES:
            path = quantize_with_llama_cpp(Path(arguments.model), kind, folder)
            models[f"llama.cpp {kind}"] = (path, path.stat().st_size)
        first = Bundle(next(iter(models.values()))[0])
        texts = [first.engine.tokenizer.encode(text)[:TOKENS] for text in passages().values()]
        prompt = first.engine.tokenizer.encode(ENGLISH)[:64]
        first.close()
        reference = reference_logits(arguments.model, texts)
        rows = []
        for label, (path, size) in models.items():
            model = open_model(path)
            rows.append({"name": label, "bytes": size} | measure([model.logits(ids) for ids in texts], texts, reference))
            model.close()
        rates: dict[str, list[float]] = {label: [] for label in models}
        for _ in range(ROUNDS):
            for label, (path, _) in models.items():
                model = open_model(path)
                rates[label].append(model.decode(prompt))
                model.close()
        for row in rows:
            row["decode_tokens_per_s"] = statistics.median(rates[row["name"]])
        rows.sort(key=lambda row: row["bytes"])
        show(rows)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
        if arguments.plot:
            plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
