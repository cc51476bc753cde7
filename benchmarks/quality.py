"""How far each scheme is from the float32 model, beside llama.cpp's quantisations of the same weights and HF's own bfloat16.

    python benchmarks/quality.py MODEL [--gguf FILE] [--json FILE]

For every position of four 512-token texts: the Kullback-Leibler divergence from the float32 model's next-token distribution, and whether
the likeliest token is the same. Bytes are those of all weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import llmc
import torch
from measuring import GGUF_TYPES, Bundle, Gguf, Logits, load_reference, measure, quantize_with_llama_cpp, reference_logits
from texts import TOKENS, passages

SCHEMES = ("bf16", "int8", "int8-g32", "int8-channel", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="HF folder or GGUF file")
    parser.add_argument("--gguf", type=Path, help="GGUF for llama.cpp to quantise, if the model is not one itself")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundles = {}
        for scheme in arguments.schemes.split(","):
            bundles[scheme] = llmc.compile(
                arguments.model,
                target="cpu-int8",
                quantization=scheme,
                cpu_levels=("native",),
                output=folder / f"{scheme}.llmc",
            )
        with llmc.load(next(iter(bundles.values())).output) as engine:
            texts = [engine.tokenizer.encode(text)[:TOKENS] for text in passages().values()]
        assert {len(tokens) for tokens in texts} == {TOKENS}, "a text is too short"
        reference = reference_logits(arguments.model, texts)
        rows: list[dict] = []

        def add(name: str, size: int, run: Callable[[list[int]], Logits]) -> None:
            row = {"name": name, "bytes": size} | measure([run(ids) for ids in texts], texts, reference)
            kl, worst, same = row["kl_mean"], row["kl_p95"], row["top1_agreement"]
            print(f"{name:24} {size / 1e6:8.1f} MB   KL {kl:.5f}  p95 {worst:.5f}   top-1 {same:.2%}", flush=True)
            rows.append(row)

        for scheme, report in bundles.items():
            model = Bundle(report.output)
            add(f"llmc {scheme}", sum(report.weight_files.values()), model.logits)
            model.close()
        half = load_reference(arguments.model, torch.bfloat16)  # the noise floor of the number format
        with torch.no_grad():
            size = sum(p.numel() * 2 for p in half.parameters())
            add("HF bfloat16", size, lambda ids: half(torch.tensor([ids])).logits[0].float().numpy())
        gguf = arguments.gguf or (Path(arguments.model) if arguments.model.endswith(".gguf") else None)
        try:
            for kind in ("as given", *GGUF_TYPES) if gguf else ():
                path = gguf if kind == "as given" else quantize_with_llama_cpp(gguf, kind, folder)
                other = Gguf(path)
                add(f"llama.cpp {kind}", path.stat().st_size, other.logits)
                other.close()
        except ModuleNotFoundError:
            print("llama-cpp-python is not installed: no llama.cpp rows", file=sys.stderr)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
