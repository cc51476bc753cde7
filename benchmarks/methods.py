"""What calibrated quantisation is worth: each method at one precision beside rounding to nearest, on text that nothing was fitted to.

    python benchmarks/methods.py MODEL [--quantization int4] [--calibration FILE] [--held-out FILE] [--json FILE]

Divergences are from the float32 model, on the four texts of `texts.py`, or on `--held-out` in pieces of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import llmc
from measuring import Bundle, measure, reference_logits
from texts import TOKENS, passages

METHODS = "rtn,opt-rtn,awq,gptq,awq+gptq,autoround"
PIECES = 64


def held_out(bundle: Path, path: Path | None) -> list[list[int]]:
    """Token ids of the texts to measure on, in pieces of at most 512."""
    with llmc.load(bundle) as engine:
        if path is None:
            return [engine.tokenizer.encode(text)[:TOKENS] for text in passages().values()]
        ids = engine.tokenizer.encode(path.read_text(encoding="utf-8"))
        return [ids[start : start + TOKENS] for start in range(0, len(ids) - TOKENS + 1, TOKENS)][:PIECES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="HF folder or GGUF file")
    parser.add_argument("--methods", default=METHODS, help="the first is the control")
    parser.add_argument("--quantization", default="int4", help="of the layers (default int4)")
    parser.add_argument("--calibration", type=Path, help="default: the built-in texts")
    parser.add_argument("--held-out", type=Path, help="a text to measure on")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict] = []
    texts: list[list[int]] = []
    reference = []
    print(f"{'method':12}{'MB':>8}{'mean KL':>10}{'of control':>12}{'p95 KL':>9}{'top-1':>8}{'ppl':>9}{'seconds':>9}", flush=True)
    for method in arguments.methods.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.llmc"
            begun = time.perf_counter()
            report = llmc.compile(
                arguments.model,
                target="cpu-int8",
                quantization=arguments.quantization,
                method=method,
                calibration=arguments.calibration if method != "rtn" else None,
                calibration_samples=arguments.samples,
                cpu_levels=("native",),
                output=path,
            )
            seconds = time.perf_counter() - begun
            if not texts:
                texts = held_out(path, arguments.held_out)
                reference = reference_logits(arguments.model, texts)
            model = Bundle(path)
            row = {"name": method, "bytes": sum(report.weight_files.values()), "seconds": seconds}
            row |= measure([model.logits(ids) for ids in texts], texts, reference)
            model.close()
        rows.append(row)
        ratio = row["kl_mean"] / rows[0]["kl_mean"]
        print(
            f"{method:12}{row['bytes'] / 1e6:8.1f}{row['kl_mean']:10.5f}{ratio:12.3f}{row['kl_p95']:9.4f}"
            f"{row['top1_agreement']:8.2%}{row['perplexity']:9.3f}{seconds:9.0f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
