"""The folder of one study: claimed when it begins, never taken from another study."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pagedsim import __version__
from pagedsim.core import ConfigError
from pagedsim.run.provenance import in_words
from pagedsim.spec.given import written
from pagedsim.spec.objects import flat
from pagedsim.spec.roots import OF_THE_STUDY
from pagedsim.spec.run import Settings
from pagedsim.user_error import shown

_NAME = "config.yaml"


@contextmanager
def claimed(folder: Path, chosen: bool) -> Iterator[Path]:
    """The folder to write to; taken away again if nothing was written in the body.

    `chosen`: by the user, so that a study may be going on there. Else two studies that begin in
    the same second have one name, and the second gets a folder beside it.
    """
    if not chosen:
        folder = _unused(folder)
    with _alone(folder):
        try:
            with full_disk_named(folder):
                yield folder
        finally:
            _remove_empty(folder)


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Raise ConfigError with the folder where the disk that it is on is full, or a file becomes too
    large; the system's errors do not name it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ConfigError(
            f"{shown(folder)}: cannot be written: {os.strerror(error.errno)}"
        ) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder; raises ConfigError if another run has it."""
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except ImportError:  # not on Windows
        yield
        return
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"hydra.run.dir={shown(folder)}: another run is at work there; choose another folder, "
            "or wait until it ends"
        ) from None
    except OSError:
        pass  # some file systems of a cluster know no locks
    try:
        yield
    finally:
        os.close(handle)


def _unused(folder: Path) -> Path:
    """`folder`, or where a study has begun there already, the next with a number behind it."""
    for number in count(2):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _NAME).touch(exist_ok=False)
            return folder
        except FileExistsError:
            folder = folder.with_name(f"{folder.name.removesuffix(f'-{number - 1}')}-{number}")
        except OSError as error:
            raise _unwritable(folder, error) from error
    raise AssertionError("unreachable")


def _remove_empty(folder: Path) -> None:
    try:
        if (folder / _NAME).stat().st_size == 0:
            (folder / _NAME).unlink()
    except OSError:
        pass  # there is none
    with suppress(OSError):  # not empty
        folder.rmdir()


def keep_configuration(config: Settings, folder: Path) -> None:
    """Write the resolved configuration, headed by the version; refuse a folder that has the runs of
    another study or of another version."""
    path = folder / _NAME
    if _has_results(folder) and path.is_file():
        where = f"hydra.run.dir={shown(folder)}: has"
        if (version := _version_of(path)) and version != __version__:
            raise ConfigError(
                f"{where} runs of pagedsim {version}, and this is {__version__}; choose another "
                "folder"
            )
        if difference := _difference(path, written(config)):
            raise ConfigError(
                f"{where} a study with {difference}; choose another folder, or the same settings "
                "to go on with that study"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = OmegaConf.to_yaml(OmegaConf.create(written(config)))
        path.write_text(f"# pagedsim {in_words()}\n{text}", encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _has_results(folder: Path) -> bool:
    """Whether a study has left more than its configuration."""
    return folder.is_dir() and any(
        path.name != _NAME and not path.name.startswith(".") for path in folder.iterdir()
    )


def _version_of(path: Path) -> str:
    """The version of pagedsim that wrote a configuration; empty where it does not say."""
    with path.open(encoding="utf-8", errors="replace") as file:
        version = re.match(r"# pagedsim ([^\s,]+)", file.readline())
    return version[1] if version else ""


def _difference(path: Path, config: Settings) -> str:
    """What the configuration in the file has otherwise, in words; empty: nothing that matters."""
    try:
        before_config = OmegaConf.to_container(OmegaConf.load(path))
    except Exception:  # none yet, or whatever YAML says of one that is not whole
        return ""
    if not isinstance(before_config, Mapping) or not before_config:
        return ""
    if (was := _target(before_config)) and was != (target := _target(config)):
        return f"study._target_={was}, not {target}"
    before, now = _bound(before_config), _bound(config)
    before_arms, now_arms = _arms(before_config), _arms(config)
    for key in dict.fromkeys([*now, *before]):
        if before.get(key) != now.get(key):
            return f"{key}={_text(before.get(key))}, not {_text(now.get(key))}"
    for arm in before_arms.keys() & now_arms.keys():
        if before_arms[arm] != now_arms[arm]:
            return f"study.arms.{arm}={before_arms[arm]}, not {now_arms[arm]}"
    if before_arms and now_arms and not before_arms.keys() & now_arms.keys():
        return f"the arms {', '.join(before_arms)}, not {', '.join(now_arms)}"
    return ""


def _target(config: Any) -> str | None:
    study = config.get("study")
    return study.get("_target_") if isinstance(study, Mapping) else None


def _bound(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Dotted keys and their values, without those that may change."""
    settings = flat({key: value for key, value in config.items() if key not in OF_THE_STUDY})
    return {key: value for key, value in settings.items() if value != {}}


def _arms(config: Any) -> dict[str, list[str]]:
    study = config.get("study")
    arms = study.get("arms") if isinstance(study, Mapping) else None
    return {str(k): list(v or ()) for k, v in arms.items()} if isinstance(arms, Mapping) else {}


def _text(value: object) -> str:
    return "null" if value is None else f"{value!s:.80}"


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"hydra.run.dir={folder}: cannot be written: {error.strerror or error}")
