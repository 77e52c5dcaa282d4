"""A tier of files below the host tier of vLLM's connector: one file a chunk, in a folder.

    folder/<fingerprint of weights and layout>/<2 digits>/<key of the chunk>.bin

A key is a digest of all tokens up to the chunk's end, so that the files outlive the engine, and
those of other models are never read. Threads read and write them in the host tier itself. What has
ended is seen when the engine looks (`poll`); until the next look nothing changes that decides.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident

import numpy as np
import torch
from numpy.typing import NDArray

from pagedsim.core import ConfigError, Scheduler
from pagedsim.core.offload import IndexedTier, VLLMOffload
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.transfers import Direction, EndedCopy
from pagedsim.engine.cache import Cache, CacheShape
from pagedsim.engine.models.loaded import LoadedModel
from pagedsim.server import ServerSpec

log = logging.getLogger(__name__)

Chunks = Sequence[HostChunk]
Content = NDArray[np.uint8]


class FileTier(IndexedTier):
    """The chunks that were in the folder when the engine began, and those that it has written."""

    def __init__(self, where: str, folder: str, threads: int) -> None:
        """`where` names the setting in errors; raises ConfigError if no file can be written."""
        super().__init__()
        self._where = f"{where}={folder}"
        self._pool: Executor = ThreadPoolExecutor(threads, "kv-files")
        self._work: dict[int, Future[int]] = {}
        self._failed: set[Direction] = set()
        with _usable(self._where):
            self._root = Path(folder).expanduser()
            self._root.mkdir(parents=True, exist_ok=True)
            (probe := self._root / f".pagedsim-{os.getpid()}").touch()
            probe.unlink()

    def bind(self, cache: Cache, chunks: int, model: LoadedModel) -> None:
        """Copy from and to this host tier of so many chunks from now on."""
        self._host = cache.cpu.view(chunks, -1).view(torch.uint8).numpy()
        self._folder = self._root / fingerprint(model, cache.shape, self._host.shape[1])
        with _usable(self._where):
            self._folder.mkdir(exist_ok=True)
            files = self._folder.glob(f"??/{'[0-9a-f]' * 32}.bin")
            self._has.update(bytes.fromhex(file.stem) for file in files)

    def store(self, job: int, chunks: Chunks, now: float) -> None:
        failing = Direction.STORE in self._failed
        absent = [chunk for chunk in chunks if not failing and chunk.key not in self._has]
        super().store(job, absent, now)
        self._begin(job, self._write, absent)

    def load(self, job: int, chunks: Chunks, now: float) -> None:
        super().load(job, chunks, now)
        self._begin(job, self._read, chunks)

    def _begin(self, job: int, work: Callable[[Path, Content], None], chunks: Chunks) -> None:
        parts = [(self._path(chunk.key), self._host[chunk.place]) for chunk in chunks]

        def copy() -> int:
            for path, content in parts:
                work(path, content)
            return sum(content.nbytes for _, content in parts)

        self._work[job] = self._pool.submit(copy)

    def _path(self, key: Hashable) -> Path:
        assert isinstance(key, bytes), "an engine's chunks are named by their tokens"
        name = key.hex()
        return self._folder / name[:2] / f"{name}.bin"

    @staticmethod
    def _write(path: Path, content: Content) -> None:
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}-{get_ident()}")
        try:
            part.write_bytes(content.data)
            part.replace(path)  # whole or not at all
        except OSError:
            part.unlink(missing_ok=True)
            raise

    @staticmethod
    def _read(path: Path, content: Content) -> None:
        with path.open("rb") as file:
            if file.readinto(content.data) != content.nbytes:
                raise OSError(f"{path} is too short")

    @property
    def busy(self) -> bool:
        """Whether a job was begun whose end was not seen."""
        return bool(self._work)

    def poll(self) -> list[EndedCopy]:
        """The jobs that are seen to have ended now."""
        ended = []
        for job in [job for job, work in self._work.items() if work.done()]:
            error = (work := self._work.pop(job)).exception()
            size = 0 if error else work.result()
            direction = self.end(job, failed=error is not None)
            assert direction is not None
            if error is not None:
                self._tell(direction, error)
            cause = error if isinstance(error, Exception) else None
            ended.append(EndedCopy(job, direction, size, 0.0, cause, below=True))
        return ended

    def _tell(self, direction: Direction, error: BaseException) -> None:
        """Say once that reading or writing fails."""
        if direction not in self._failed:
            self._failed.add(direction)
            what = "a read failed (%s); what cannot be read is computed, here and from now on"
            if direction is Direction.STORE:
                what = "a write failed (%s); nothing more is written there"
            log.warning(f"%s: {what}", self._where, f"{type(error).__name__}: {error}")

    def clear(self) -> None:
        """Wait for all jobs, and forget them."""
        for work in self._work.values():
            work.exception()
        self._work.clear()
        super().clear()

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def _usable(where: str) -> Iterator[None]:
    """Within, an error of the folder becomes a ConfigError that names it."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # the others: of its name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{where}: no files can be kept there: {reason}") from error


@contextmanager
def empty_folders(server: ServerSpec) -> Iterator[ServerSpec]:
    """The server with its tiers of files in empty folders within theirs, which go at the end: what
    a run of a study finds is not to depend on the runs before it."""
    offload = server.offloading
    if not (isinstance(offload, VLLMOffload) and isinstance(offload.tiers, Mapping)):
        yield server
        return
    tiers = dict(offload.tiers)
    with ExitStack() as stack:
        for name, given in offload.tiers.items():
            folder = given.get("folder") if isinstance(given, Mapping) else None
            if isinstance(folder, str | os.PathLike) and str(folder):
                with _usable(f"offload.tiers.{name}.folder={folder}"):
                    (root := Path(folder).expanduser()).mkdir(parents=True, exist_ok=True)
                    own = stack.enter_context(TemporaryDirectory(prefix="run-", dir=root))
                tiers[name] = {**given, "folder": own}
        yield replace(server, offload=replace(offload, tiers=tiers))


def fingerprint(model: LoadedModel, shape: CacheShape, chunk_bytes: int) -> str:
    """Of what decides the bytes of a chunk of given tokens."""
    digest = blake2b(f"{shape} {chunk_bytes} {model.config}".encode(), digest_size=8)
    for name, tensor in model.module.state_dict().items():
        sample = tensor.detach().flatten()[:64].double().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()


def bind_tiers(scheduler: Scheduler, cache: Cache, model: LoadedModel) -> None:
    """Let all that a scheduler's connector has copy from and to the host tier in this cache."""
    if (connector := scheduler.queues.connector) is not None:
        for tier in file_tiers(scheduler):
            tier.bind(cache, connector.host.capacity, model)


def file_tiers(scheduler: Scheduler) -> Sequence[FileTier]:
    """Those below its host tier."""
    connector = scheduler.queues.connector
    tiers = () if connector is None else connector.lower.tiers
    return [tier for tier in tiers if isinstance(tier, FileTier)]
