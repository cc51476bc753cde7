"""How far each scheme is from the float32 model, beside llama.cpp's quantisations of the same weights and HF's own bfloat16.

    python benchmarks/quality.py MODEL [--offgrid FOLDER] [--json FILE]

For every position of four 512-token texts: the Kullback-Leibler divergence from the float32 model's next-token distribution, and whether
the likeliest token is the same. Bytes are those of all weights.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llmc
import numpy as np
import torch
from llmc.compiler.checkpoint import open_checkpoint
from texts import TOKENS, passages
from transformers import AutoModelForCausalLM

Logits = np.ndarray
SCHEMES = ("bf16", "int8", "int8-g32", "int8-channel", "int4")
GGUF_TYPES = {"Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q4_K_M": 15, "Q4_0": 2}


def load_reference(model: str, dtype: torch.dtype) -> torch.nn.Module:
    """The HF model with the checkpoint's weights, read by llmc's own front end."""
    checkpoint = open_checkpoint(model)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(checkpoint.config, dtype=dtype)
    reference = reference.to_empty(device="cpu").eval()
    state = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.tensor_names()}
    reference.load_state_dict(state, strict=False)
    reference.tie_weights()
    fresh = AutoModelForCausalLM.from_config(_small(checkpoint.config), dtype=dtype)  # buffers that no checkpoint stores
    for name, buffer in fresh.named_buffers():
        reference.get_buffer(name).copy_(buffer)
    return reference


def _small(config: object) -> object:
    import copy

    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    if getattr(small, "layer_types", None):
        small.num_hidden_layers = len(set(small.layer_types))
        small.layer_types = sorted(set(small.layer_types))
    return small


def compare(reference: Logits, logits: Logits) -> tuple[np.ndarray, np.ndarray]:
    """KL(reference || logits) in nats and top-1 agreement, for each row."""
    p, q = torch.from_numpy(reference).log_softmax(-1), torch.from_numpy(np.ascontiguousarray(logits)).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).numpy(), (p.argmax(-1) == q.argmax(-1)).numpy()


def measure(name: str, size: int, run: Callable[[list[int]], Logits], texts: list[list[int]], reference: list[Logits]) -> dict:
    """One row of the table."""
    pairs = [compare(expected, run(tokens)) for tokens, expected in zip(texts, reference, strict=True)]
    kl, same = (np.concatenate(values) for values in zip(*pairs, strict=True))
    row = {"name": name, "bytes": size, "kl_mean": float(kl.mean()), "kl_p95": float(np.quantile(kl, 0.95))}
    row |= {"kl_max": float(kl.max()), "top1": float(same.mean())}
    print(
        f"{name:24} {size / 1e6:8.1f} MB   KL {row['kl_mean']:.5f}  p95 {row['kl_p95']:.5f}   top-1 {row['top1']:.2%}",
        flush=True,
    )
    return row


def hugging_face_row(model: str, texts: list[list[int]], reference: list[Logits]) -> dict:
    """Transformers in bfloat16 throughout: the noise floor of the number format."""
    half = load_reference(model, torch.bfloat16)
    size = sum(p.numel() * 2 for p in half.parameters())
    return measure("HF bfloat16", size, lambda ids: half(torch.tensor([ids])).logits[0].float().numpy(), texts, reference)


@cache
def _silence() -> object:
    """Stop the line for every tensor that llama.cpp quantises; what it calls has to stay alive, so it is kept here."""
    import llama_cpp

    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def quantize_with_llama_cpp(gguf: Path, name: str, folder: Path) -> Path:
    """The file in llama.cpp's type `name`, made below `folder`."""
    import llama_cpp

    _silence()
    path = folder / f"{name}.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = GGUF_TYPES[name], 2, True
    failed = llama_cpp.llama_model_quantize(str(gguf).encode(), str(path).encode(), params)
    assert not failed, f"llama.cpp cannot make {name} of {gguf}"
    return path


def llama_cpp_rows(gguf: Path, texts: list[list[int]], reference: list[Logits], folder: Path) -> list[dict]:
    """llama.cpp's own quantisations of an f16 or f32 GGUF, and the file as it is."""
    import llama_cpp

    rows = []
    for name in ("as given", *GGUF_TYPES):
        path = gguf if name == "as given" else quantize_with_llama_cpp(gguf, name, folder)
        model = llama_cpp.Llama(str(path), n_ctx=TOKENS, n_batch=TOKENS, n_threads=2, logits_all=True, verbose=False)

        def run(tokens: list[int], model: llama_cpp.Llama = model) -> Logits:
            model.reset()
            model.eval(tokens)
            return np.array(model.scores[: len(tokens)])

        rows.append(measure(f"llama.cpp {name}", path.stat().st_size, run, texts, reference))
        model.close()
        if path != gguf:
            path.unlink()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="HF folder or GGUF file")
    parser.add_argument("--gguf", type=Path, help="GGUF for llama.cpp to quantise, if the model is not one itself")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reference_model = load_reference(arguments.model, torch.float32)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
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
        with llmc.load(bundles["bf16" if "bf16" in bundles else next(iter(bundles))].output) as engine:
            texts = [engine.tokenizer.encode(text)[:TOKENS] for text in passages().values()]
        assert {len(tokens) for tokens in texts} == {TOKENS}, "a text is too short"
        reference = [reference_model(torch.tensor([tokens])).logits[0].numpy() for tokens in texts]
        rows = []
        for scheme, report in bundles.items():
            with llmc.load(report.output) as engine:
                rows.append(measure(f"llmc {scheme}", sum(report.weight_files.values()), engine.logits, texts, reference))
        del reference_model
        rows.append(hugging_face_row(arguments.model, texts, reference))
        gguf = arguments.gguf or (Path(arguments.model) if arguments.model.endswith(".gguf") else None)
        try:
            rows += llama_cpp_rows(gguf, texts, reference, folder) if gguf else []
        except ModuleNotFoundError:
            print("llama-cpp-python is not installed: no llama.cpp rows", file=sys.stderr)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
