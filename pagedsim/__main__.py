"""The front door: compose the configuration, dispatch to the study, nothing else."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING, Any

from pagedsim.core.errors import choices
from pagedsim.user_error import UserError, guarded

if TYPE_CHECKING:
    from omegaconf import DictConfig

_FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--multirun", "-m", "--run", "-r"),
    *("--resolve", "--shell-completion", "-sc"),
)
_COMMANDS = ("bench", "policies", "serve")
_SHOWS = ("job", "hydra", "all")
_TELLS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_WITH_VALUE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--cfg", "-c"), _SHOWS),
    **dict.fromkeys(("--info", "-i"), _TELLS),
    **dict.fromkeys(("--package", "-p", "--config-dir", "-cd", "--config-name", "-cn"), ()),
    **dict.fromkeys(("--config-path", "-cp", "--experimental-rerun"), ()),
}
"""Hydra's options that a value follows, and what it may be (nothing: anything)."""
_PLAIN = re.compile(r"hydra\.(run\.dir=(?!null$)[\w./@: -]+$|verbose=)")
"""Settings of Hydra's that a run without its options may have."""
_HYDRAS = re.compile(r"-|[+~]*hydra|.*\$\{(now|hydra|python_version)\b")
"""Words that Hydra alone understands."""
_ALLOCATIONS = 200_000
"""Objects between two collections of garbage: a study imports and composes fewer, nearly all of
which stay, and Python's 700 would have them looked through again and again."""


def run(root: str = "config") -> None:
    """Compose the configuration and carry it out; imported late, so that no import is outside the
    guard against errors.

    `root` is the configuration to compose: of a study, or (serve) of a server.
    """
    from pagedsim.requirements import refuse_older

    refuse_older()
    if any(word.startswith("hydra/launcher=submitit") for word in sys.argv[1:]):
        refuse_older("cluster")
    failures: list[Exception] = []
    other = any(_HYDRAS.match(word) and not _PLAIN.match(word) for word in sys.argv[1:])
    try:
        (_by_hydra if other else _once)(root, failures)
    except KeyboardInterrupt:
        _conclude(interrupted=True)
        raise
    except OSError as error:  # a study's own errors are in `failures`
        if error.filename is None:
            raise  # not of a file: Hydra found no such option
        key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(sys.argv) else "hydra.run.dir"
        why = f"cannot be written: {error.strerror or error}"
        raise UserError([f"{key}={error.filename}: {why}"]) from error
    except Exception as error:  # a launcher's, of jobs whose processes died
        _conclude(died=error)
        raise
    finally:
        _over()
    _conclude()
    if failures:
        raise failures[0]


def _by_hydra(root: str, failures: list[Exception]) -> None:
    """Sweeps, printed configurations, and all else that options of Hydra's ask for."""
    import hydra

    from pagedsim.config import register
    from pagedsim.options import offered

    register(offered())

    @hydra.main(version_base="1.3", config_path="pkg://pagedsim.conf", config_name=root)
    def study(config: DictConfig) -> None:
        _carry_out(root, config, failures)

    study()


def _once(root: str, failures: list[Exception]) -> None:
    """One run or server, composed without Hydra, which would take several times as long."""
    from pagedsim.core.errors import require_flag
    from pagedsim.options import Options
    from pagedsim.overrides import parse

    words = [word for word in sys.argv[1:] if not _PLAIN.match(word)]
    try:
        several = "-m tries each; " if root == "config" else ""
        given = [parse(word, several) for word in sys.argv[1:]]
        own = {one.key: one.value for one in given if one.word not in words}
        require_flag("hydra.verbose", own.get("hydra.verbose", False))
        options = Options()
        made = options.compose(root, words)
        if root == "serve":
            from pagedsim.serve.command import serve

            serve(made.config)
            return
    except Exception as error:
        failures.append(error)
        return
    named = f"outputs/%Y-%m-%d/%H-%M-%S-{made.choices.get('experiment')}"  # as in config.yaml
    folder = os.path.abspath(str(own.get("hydra.run.dir", strftime(named))))
    os.makedirs(folder, exist_ok=True)
    try:
        from pagedsim.run.folder import claimed
        from pagedsim.run.runner import begun

        with claimed(Path(folder), "hydra.run.dir" in own) as there:
            begun(words, there, options, root).execute()
    except Exception as error:
        failures.append(error)


def _carry_out(root: str, config: DictConfig, failures: list[Exception]) -> None:
    try:
        if root == "serve":
            from hydra.core.hydra_config import HydraConfig

            from pagedsim.options import drop_replaced
            from pagedsim.overrides import parse
            from pagedsim.serve.command import serve

            drop_replaced(config, [parse(word) for word in HydraConfig.get().overrides.task])
            serve(config)
        else:
            from pagedsim.run.multirun import run_experiment

            run_experiment()
    except Exception as error:  # Hydra would print words of its own around it
        failures.append(error)


def _manual(root: str) -> str:
    """The manual page of a root; Hydra would first list all groups of its own."""
    if root == "serve":
        from pagedsim.serve.manual import page
    else:
        from pagedsim.run.help import manual_page as page
    return page()


def _over() -> None:
    """Take down what a sweep shows while it runs."""
    if "pagedsim.run.multirun" in sys.modules:  # else none has begun
        from pagedsim.run.multirun import Multirun

        Multirun.over()


def _conclude(interrupted: bool = False, died: Exception | None = None) -> None:
    """End a sweep, if there was one."""
    from pagedsim.run.multirun import conclude

    conclude(interrupted, died)


def in_order(words: Sequence[str]) -> list[str]:
    """The command line with its options first, where Hydra wants them; they may stand anywhere."""
    options: list[str] = []
    overrides: list[str] = []
    left = iter(map(_at_home, words))
    for word in left:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif name in _WITH_VALUE:
            options += [name, _checked(name, value if equals else next(left, ""))]
        elif word in _FLAGS:
            options.append(word)
        else:
            known = [one for one in (*_FLAGS, *_WITH_VALUE) if one.startswith("--")]
            raise UserError([f"{word}: no such option; {choices(name, known)}"])
    return [*options, *overrides]


def _at_home(word: str) -> str:
    """A word whose value is a path from ~ on, which shells leave alone there, and Hydra refuses."""
    key, equals, value = word.partition("=")
    is_path = equals and re.match(r"~\w*(/|$)", value)
    return f"{key}={os.path.expanduser(value)}" if is_path else word


def _checked(option: str, value: str) -> str:
    allowed = _WITH_VALUE[option]
    if not value or (allowed and value not in allowed):
        raise UserError(
            [f"{option} {value}".rstrip() + f": takes {', '.join(allowed) or 'a value'}"]
        )
    return value


def command() -> None:
    """What the words of the command line ask for."""
    words, root = sys.argv[1:], "config"
    if words[:1] == ["policies"] or words in (["--help", "policies"], ["-h", "policies"]):
        print(_policies([word for word in words if word != "policies"]))
        return
    if (at := _place("serve", words)) is not None:
        from pagedsim.serve.command import completed

        words, root = completed([*words[:at], *words[at + 1 :]]), "serve"
    elif (at := _place("bench", words)) is not None:
        from pagedsim.run.help import BENCH_HELP, bench_words

        if {"--help", "-h"} & set(words):
            print(BENCH_HELP)
            return
        words = bench_words([*words[:at], *words[at + 1 :]])
    else:
        _refuse_no_command(words)
    sys.argv[1:] = in_order(words)
    if "--version" in words:
        from pagedsim.run.provenance import built, in_words

        print(f"pagedsim {in_words()}, {built()}")
    elif {"--help", "-h"} & set(words):
        print(_manual(root))
    else:
        run(root)


def _place(command: str, words: Sequence[str]) -> int | None:
    """Where a command stands: before all settings, and not as an option's value."""
    for at, word in enumerate(words):
        if word == command and (at == 0 or words[at - 1] not in _WITH_VALUE):
            return at
        if "=" in word and not word.startswith("-"):
            break
    return None


def _refuse_no_command(words: Sequence[str]) -> None:
    """Raise UserError where the first word is neither a command nor a setting."""
    for at, word in enumerate(words):
        if word.startswith("-") or (at > 0 and words[at - 1] in _WITH_VALUE):
            continue
        if "=" not in word and not word.startswith("~"):
            known = choices(word, (*_COMMANDS, "--help"))
            raise UserError([f"{word}: cannot be read as key=value, and is no command; {known}"])
        return


def _policies(words: Sequence[str]) -> str:
    """What `python -m pagedsim policies` prints."""
    from pagedsim.run.help import POLICIES_HELP, policies_page

    if not words:
        return policies_page()
    if words[0] not in ("--help", "-h"):
        raise UserError([f"policies {words[0]}: takes no words; it lists every policy there is"])
    return POLICIES_HELP


class _Outliving(FileIO):
    """A file descriptor that takes what is written, and drops it once a pipe is closed."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def _outlive_pipes() -> None:
    """A closed pipe (`| head`) ends nothing: what is printed is lost, and results are written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # none, or one that is not the process's own
        stream.flush()
        raw = _Outliving(stream.fileno(), "w", closefd=False)
        own = TextIOWrapper(
            BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, own)


def main() -> None:
    """`python -m pagedsim`."""
    _outlive_pipes()
    gc.set_threshold(_ALLOCATIONS)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # numpy's threads wait asleep
    if os.getcwd() not in sys.path:  # where a policy of one's own lies
        sys.path.insert(0, os.getcwd())
    root = "config" if _place("serve", sys.argv[1:]) is None else "serve"
    code = guarded(command, root)
    gc.freeze()  # Python would look through all of it once more, to end
    sys.exit(code)


if __name__ == "__main__":
    main()
