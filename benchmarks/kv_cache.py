"""What the KV cache's dtypes cost: bytes, and divergence over one long context from the same weights with a float32 cache.

    python benchmarks/kv_cache.py MODEL [--tokens 2000] [--dtypes bf16,fp8,int8,auto,int4] [--json FILE]

Every position of the context counts, so that late ones, which read a long quantised cache, weigh as much as early ones. Decoding rates
are of tokens after the whole context, medians of rounds in which every dtype takes its turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import llmc
from measuring import Bundle, measure
from texts import passages

DTYPES = "f32,bf16,fp8,int8,auto,int4"
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="HF folder or GGUF file")
    parser.add_argument("--dtypes", default=DTYPES, help="the first is the control")
    parser.add_argument("--quantization", default="int8", help="of the weights, the same for all")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows, paths = [], {}
        ids: list[int] = []
        reference = []
        for dtype in arguments.dtypes.split(","):
            paths[dtype] = Path(name) / f"{dtype}.llmc"
            report = llmc.compile(
                arguments.model,
                target="cpu-int8",
                quantization=arguments.quantization,
                kv_dtype=dtype,
                method="rtn",
                cpu_levels=("native",),
                output=paths[dtype],
            )
            target = next(iter(report.targets.values()))
            model = Bundle(paths[dtype])
            if not ids:
                ids = model.engine.tokenizer.encode("\n\n".join(passages().values()))[: arguments.tokens]
                assert len(ids) == arguments.tokens, f"the texts have {len(ids)} tokens"
            logits = model.logits(ids)
            model.close()
            reference = reference or [logits]
            row = {"name": dtype, "bytes_per_token": target.kv_bytes_per_token, "bytes_per_sequence": target.kv_bytes_per_slot}
            rows.append(row | measure([logits], [ids], reference))
        rates: dict[str, list[float]] = {dtype: [] for dtype in paths}
        for _ in range(ROUNDS):
            for dtype, path in paths.items():
                model = Bundle(path)
                rates[dtype].append(model.decode(ids))
                model.close()
    print(f"{'KV cache':10}{'B/token':>9}{'+ B/seq.':>10}{'MB in all':>11}{'mean KL':>10}{'p95 KL':>9}{'top-1':>9}{'tok/s':>8}")
    for row in rows:
        row["decode_tokens_per_s"] = statistics.median(rates[row["name"]])
        total = arguments.tokens * row["bytes_per_token"] + row["bytes_per_sequence"]
        print(
            f"{row['name']:10}{row['bytes_per_token']:9}{row['bytes_per_sequence']:10}{total / 1e6:11.2f}{row['kl_mean']:10.5f}"
            f"{row['kl_p95']:9.4f}{row['top1_agreement']:9.2%}{row['decode_tokens_per_s']:8.1f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
