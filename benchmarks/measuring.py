"""What the quality benches share: the float32 reference, models of ours and of llama.cpp behind one interface, and their comparison."""

from __future__ import annotations

import copy
import ctypes
import time
from functools import cache
from pathlib import Path
from typing import Protocol

import llmc
import numpy as np
import torch
from llmc.compiler.checkpoint import open_checkpoint
from llmc.quantization.quality import QualityMeter
from texts import TOKENS
from transformers import AutoModelForCausalLM

Logits = np.ndarray
GGUF_TYPES = {"Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q4_K_M": 15, "Q4_0": 2}
GENERATED = 48  # tokens of a timed decode


class Model(Protocol):
    """Something that turns token ids into logits."""

    def logits(self, ids: list[int]) -> Logits:
        """Float32 `[T, vocabulary]`."""
        ...

    def decode(self, ids: list[int]) -> float:
        """Tokens per second after the prompt `ids`."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class Bundle:
    """One of ours."""

    def __init__(self, path: Path) -> None:
        self.engine = llmc.load(path, max_num_seqs=1)

    def logits(self, ids: list[int]) -> Logits:
        return self.engine.logits(ids)

    def decode(self, ids: list[int]) -> float:
        params = llmc.SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
        return self.engine.generate(ids, params).stats.decode_tokens_per_s

    def close(self) -> None:
        self.engine.close()


class Gguf:
    """One of llama.cpp's."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self.model = llama_cpp.Llama(str(path), n_ctx=2 * TOKENS, n_batch=TOKENS, n_threads=2, logits_all=True, verbose=False)

    def logits(self, ids: list[int]) -> Logits:
        self.model.reset()
        self.model.eval(ids)
        return np.array(self.model.scores[: len(ids)])

    def decode(self, ids: list[int]) -> float:
        self.model.reset()
        self.model.eval(ids)
        start = time.perf_counter()
        for _ in range(GENERATED):
            self.model.eval([int(np.argmax(self.model.scores[self.model.n_tokens - 1]))])
        return GENERATED / (time.perf_counter() - start)

    def close(self) -> None:
        self.model.close()


def open_model(path: Path) -> Model:
    """A bundle or a GGUF file."""
    return Bundle(path) if path.is_dir() else Gguf(path)


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


def reference_logits(model: str, texts: list[list[int]]) -> list[Logits]:
    """The float32 model's logits of each text, `[T, vocabulary]`."""
    reference = load_reference(model, torch.float32)
    with torch.no_grad():
        return [reference(torch.tensor([ids])).logits[0].numpy() for ids in texts]


def measure(logits: list[Logits], texts: list[list[int]], reference: list[Logits]) -> dict[str, float]:
    """A model's logits of the texts against the float32 model's, by the names of `Quality.as_json`."""
    meter = QualityMeter()
    for ids, found, expected in zip(texts, logits, reference, strict=True):
        rows = torch.from_numpy(np.ascontiguousarray(found[:-1]))
        meter.add(torch.from_numpy(expected[:-1]), rows, torch.tensor(ids[1:]))
    return meter.result().as_json()


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


def _small(config: object) -> object:
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    if getattr(small, "layer_types", None):
        small.num_hidden_layers = len(set(small.layer_types))
        small.layer_types = sorted(set(small.layer_types))
    return small
