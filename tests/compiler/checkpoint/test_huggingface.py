"""Folders written by save_pretrained come back as the same model; damaged ones are one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from llmc.compiler.checkpoint import ARCHITECTURES, Checkpoint, open_checkpoint
from llmc.errors import CheckpointError, LlmcError, UnsupportedModelError
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "tiny-llama"
    tiny.make_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sharded(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "sharded"
    tiny.make_model("llama").save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def failure(path: Path) -> str:
    with pytest.raises(LlmcError) as caught:
        open_checkpoint(str(path))
    text = str(caught.value)
    assert "\n" not in text
    assert str(path.parent) in text
    return text


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
def test_round_trip(model_type: str, shard_size: str, tiny, tmp_path: Path) -> None:
    model = tiny.make_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    checkpoint = open_checkpoint(str(tmp_path))
    assert isinstance(checkpoint, Checkpoint)
    assert torch.equal(tiny.logits(tiny.reload(checkpoint)), tiny.logits(model))
    for name in checkpoint.tensor_names():
        assert checkpoint.dtype(name) == "F32"
        assert torch.equal(checkpoint.tensor(name), model.state_dict()[name])


def test_names_shapes_and_ids(saved: Path) -> None:
    checkpoint = open_checkpoint(str(saved))
    assert checkpoint.name == "tiny-llama"
    assert checkpoint.path == saved
    assert checkpoint.shape("model.layers.1.self_attn.k_proj.weight") == (32, 64)
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert not checkpoint.has_tokenizer
    for method in (checkpoint.shape, checkpoint.dtype, checkpoint.tensor):
        with pytest.raises(CheckpointError, match="no tensor named 'nonsense'"):
            method("nonsense")


def test_sixteen_bit_types_are_kept(saved: Path, copy: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    for index, dtype in enumerate((torch.bfloat16, torch.float16)):
        tensors[names[index]] = tensors[names[index]].to(dtype)
    save_file(tensors, copy / "model.safetensors")
    checkpoint = open_checkpoint(str(copy))
    assert [checkpoint.dtype(name) for name in names[:3]] == ["BF16", "F16", "F32"]
    assert checkpoint.tensor(names[0]).dtype == torch.bfloat16


def test_eos_ids_are_the_union_of_all_sources(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 2], "temperature": 0.7}')
    added = {"7": {"content": "<|end|>"}, "8": {"content": "x"}}
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "added_tokens_decoder": added}))
    config = open_checkpoint(str(copy)).generation_config
    assert config == {"bos_token_id": 1, "pad_token_id": 0, "temperature": 0.7, "eos_token_id": [2, 5, 7]}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_prefixes_are_stripped(prefix: str, tiny, tmp_path: Path) -> None:
    model = tiny.make_model("gemma3_text")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    renamed = {prefix + name.removeprefix("model."): tensor.clone() for name, tensor in state.items()}
    renamed["vision_tower.x.weight"] = torch.zeros(2)
    save_file(renamed, tmp_path / "model.safetensors")
    config = {"model_type": "gemma3", "text_config": model.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensor_names() == frozenset(state)
    assert torch.equal(tiny.logits(tiny.reload(checkpoint)), tiny.logits(model))


def test_tied_matrix_saved_only_as_lm_head(tiny, tmp_path: Path) -> None:
    model = tiny.make_model("qwen3")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert "lm_head.weight" not in checkpoint.tensor_names()
    assert torch.equal(checkpoint.tensor("model.embed_tokens.weight"), tensors["lm_head.weight"])


def test_config_override_may_have_fewer_layers(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    override = tmp_path / "short.json"
    override.write_text(json.dumps({**config, "num_hidden_layers": 1}))
    checkpoint = open_checkpoint(str(saved), config_override=override)
    assert checkpoint.config.num_hidden_layers == 1
    assert not any("layers.1." in name for name in checkpoint.tensor_names())


def test_missing_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "config.json: no such file" in failure(copy)
    (copy / "adapter_config.json").write_text("{}")
    assert "merge the adapter" in failure(copy)


@pytest.mark.parametrize("text", ["{", "[1]", "", "\x00", "[" * 100_000])
def test_bad_json(text: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    assert "config.json" in failure(copy)


def test_config_that_is_not_utf8(copy: Path) -> None:
    (copy / "config.json").write_bytes(b'{"a": "\xff"}')
    assert "not valid JSON" in failure(copy)


@pytest.mark.parametrize("keep", [0, 7, 8, 500, 100_000])
def test_truncated_file(keep: int, copy: Path) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    assert keep < len(data)
    file.write_bytes(data[:keep])
    assert "model.safetensors: not a whole safetensors file" in failure(copy)


def test_only_pickled_weights(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    text = failure(copy)
    assert "pytorch_model.bin" in text
    assert "safetensors" in text


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "expected a folder with safetensors" in failure(copy)


def test_shard_without_index(shards: Path) -> None:
    (shards / INDEX).unlink()
    assert "add its index" in failure(shards)


def test_missing_shard(shards: Path) -> None:
    sorted(shards.glob("*.safetensors"))[0].unlink()
    assert "1 of" in failure(shards)


def test_index_naming_an_absent_tensor(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = next(iter(index["weight_map"].values()))
    (shards / INDEX).write_text(json.dumps(index))
    assert "ghost.weight" in failure(shards)


@pytest.mark.parametrize("target", ["../evil.safetensors", "/etc/passwd", "a/../../b", "", 3, "..\\evil"])
def test_index_leaving_the_folder(target: object, shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = target
    (shards / INDEX).write_text(json.dumps(index))
    assert "expected the name of a file in this folder" in failure(shards)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(weight_map: object, shards: Path) -> None:
    (shards / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "weight_map" in failure(shards)


def test_absent_tensor_and_wrong_shape(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]  # not tied, so it is needed
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, copy / "model.safetensors")
    text = failure(copy)
    assert "1 absent (lm_head.weight)" in text
    assert "model.norm.weight is [3], expected [64]" in text


def test_unsupported_stored_type(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float64)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight: stored type F64 .* F32, F16, BF16"):
        open_checkpoint(str(copy))


def test_two_names_for_one_parameter(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, copy / "model.safetensors")
    assert "keep one" in failure(copy)


@pytest.mark.parametrize("name", ["no-such-folder", "/no/such/file.gguf", "a/b/c"])
def test_nothing_there(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(name)


def test_a_file_inside_the_folder(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="name the folder"):
        open_checkpoint(str(saved / "model.safetensors"))


def test_hub_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("offline\nmode")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"org/model: .*not available from the hub \(OSError: offline mode\)"):
        open_checkpoint("org/model")


def test_hub_id_is_the_name(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(saved))
    assert open_checkpoint("org/model").name == "org/model"
