"""The parts of a bundle that come from the checkpoint as they are: config, generation config, tokenizer, and facts about the model."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from .. import __version__
from ..errors import UsageError
from ..runtime.manifest import ModelFacts
from ..runtime.tokenizer_index import INDEX_NAME, build_index
from .checkpoint import Checkpoint
from .report import CompileReport


def write_model_files(root: Path, checkpoint: Checkpoint) -> None:
    """Write config.json, generation_config.json and, where the checkpoint has one, the tokenizer into the bundle."""
    config = checkpoint.config.to_dict()
    for absent in ("_name_or_path", "transformers_version"):
        config.pop(absent, None)
    config["architectures"] = [type_name(checkpoint)]
    for name, value in (("config.json", config), ("generation_config.json", checkpoint.generation_config)):
        (root / name).write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    if checkpoint.has_tokenizer:
        checkpoint.write_tokenizer(root)
        index = build_index((root / "tokenizer.json").read_bytes())
        if index is not None:
            (root / INDEX_NAME).write_bytes(index)


def type_name(checkpoint: Checkpoint) -> str:
    """The HF class that computes the model, such as `LlamaForCausalLM`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[checkpoint.config.model_type])


def model_facts(checkpoint: Checkpoint, report: CompileReport) -> ModelFacts:
    """The manifest's `model` entry."""
    return ModelFacts(
        name=report.model,
        architecture=type_name(checkpoint),
        num_parameters=report.num_parameters,
        vocab_size=checkpoint.config.vocab_size,
        context_length=checkpoint.config.max_position_embeddings,
    )


def toolchain() -> dict[str, str]:
    """Versions of the packages whose change could change the bundle's bytes."""
    return {
        "llmc": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def truncate_layers(checkpoint: Checkpoint, num_layers: int) -> None:
    """Keep the first `num_layers` layers. Raises `UsageError` where the model has fewer."""
    config = checkpoint.config
    if num_layers > config.num_hidden_layers:
        raise UsageError(f"--num-layers {num_layers}: the model has {config.num_hidden_layers} layers")
    config.num_hidden_layers = num_layers
    for name in ("layer_types",):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:num_layers])
