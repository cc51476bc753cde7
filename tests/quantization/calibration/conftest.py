"""A small tokenizer that begins every text with `<s>`, as Llama's does, and a chat template that writes `<s>` as well."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from llmc.quantization.calibration.builtin import builtin_texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<unk>", "<s>", "</s>"]
VOCAB_SIZE = 600
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_tokenizer(bos=True, template=TEMPLATE)` -> the folder that `Checkpoint.write_tokenizer` would have written."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([builtin_texts()["english_prose"]], trainer)

    def make(*, bos: bool = True, template: str | None = TEMPLATE) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        copy = Tokenizer.from_str(tokenizer.to_str())
        if bos:
            copy.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        copy.save(str(folder / "tokenizer.json"))
        names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture(scope="session")
def tokenizer_folder(make_tokenizer: Callable[..., Path]) -> Path:
    """With `<s>` first, and a chat template."""
    return make_tokenizer()
