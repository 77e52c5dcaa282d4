"""The front door: compose the configuration, dispatch to the study, nothing else."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING, Any

from pagedsim.core.errors import choices
from pagedsim.user_error import UserError, guarded

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from pagedsim.spec.composed import Composed

_FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--multirun", "-m", "--run", "-r"),
    *("--resolve", "--shell-completion", "-sc"),
)
_COMMANDS = ("bench", "cite", "figures", "policies", "serve")
_SHOWS = ("job", "hydra", "all")
_TELLS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_WITH_VALUE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--cfg", "-c"), _SHOWS),
    **dict.fromkeys(("--info", "-i"), _TELLS),
    **dict.fromkeys(("--package", "-p", "--config-dir", "-cd", "--config-name", "-cn"), ()),
    **dict.fromkeys(("--config-path", "-cp", "--experimental-rerun"), ()),
}
"""Hydra's options that a value follows, and what it may be (nothing: anything)."""
_OWN = ("--config-dir", "-cd", "--package", "-p", "--cfg", "-c")
"""Options of Hydra's, with values, that a single run carries out itself."""
_OWN_FLAGS = ("--resolve", "--run", "-r")
_OWN_SETTINGS = re.compile(r"hydra\.(run\.dir=(?!null$)[\w./@: -]+$|verbose=)")
"""Settings of Hydra's that a single run carries out itself."""
_ALLOCATIONS = 200_000
"""Objects between two collections of garbage: a study imports and composes fewer, nearly all of
which stay, and Python's 700 would have them looked through again and again."""


def run(words: Sequence[str], root: str, draws: bool = False) -> None:
    """Compose the configuration of a study, or (`serve`) of a server, and carry it out.

    `draws`: a study whose runs are all there is published again. Imported late, so that no import
    is outside the guard against errors.
    """
    from pagedsim.requirements import refuse_older

    refuse_older()
    if any(word.startswith("hydra/launcher=submitit") for word in words):
        refuse_older("cluster")
    options, overrides = _split(words)
    alone = options.keys() <= {*_OWN, *_OWN_FLAGS} and all(map(_is_own, overrides))
    if draws and not alone:
        raise UserError(["figures: takes no results of a command with options of Hydra's own"])
    if not alone or options.get("--cfg", options.get("-c", "job")) != "job":
        _by_hydra(options, overrides, root)
        return
    from pagedsim.spec.composed import Composed
    from pagedsim.spec.conf import Conf

    names = [word for word in overrides if not _OWN_SETTINGS.match(word)]
    composed = Composed.of(names, Conf(_folders(options), root))
    if {"--cfg", "-c"} & options.keys():
        print(_shown(composed, options), end="")
    elif root == "serve":
        from pagedsim.serve.command import serve

        serve(composed)
    else:
        from pagedsim.run.folder import claimed
        from pagedsim.run.runner import Execution
        from pagedsim.spec.study import StudySpec

        folder, chosen = _folder_of(composed, [word for word in overrides if word not in names])
        with claimed(folder, chosen) as place:
            study = StudySpec.from_composed(names, composed, place)
            Execution.of(study, quiet=draws).execute(draws)
            for path in sorted(place.glob("plots/*")) if draws else ():
                print(path)


def _folder_of(composed: Composed, settings: Sequence[str]) -> tuple[Path, bool]:
    """Where the results of a study go, and whether settings of Hydra's say so."""
    from pagedsim.core.errors import require_flag
    from pagedsim.spec.words import parse

    given = {change.key: change for change in map(parse, settings)}
    verbose = given.get("hydra.verbose")
    require_flag("hydra.verbose", verbose is not None and verbose.value)
    named = f"outputs/%Y-%m-%d/%H-%M-%S-{composed.choices.get('experiment')}"  # as in config.yaml
    chosen = "hydra.run.dir" in given
    if not chosen:
        return Path(os.path.abspath(strftime(named))), False
    change = given["hydra.run.dir"]
    is_text = isinstance(change.value, str)  # 7e5 is a name, too
    place = change.value if is_text else change.typed.partition("=")[2]
    return Path(os.path.abspath(place)), True


def _shown(composed: Composed, options: Mapping[str, str]) -> str:
    """What `--cfg job` prints."""
    from omegaconf import OmegaConf

    from pagedsim.spec.conf import no_key, select
    from pagedsim.spec.words import text_of

    tree = composed.resolved(missing=True) if "--resolve" in options else composed.tree
    package = options.get("--package", options.get("-p", ""))
    part = select(tree, package, absent=composed) if package else tree
    if part is composed:
        raise no_key(package, tree)
    if not isinstance(part, dict | list):
        return f"# @package {package}\n{text_of(part)}\n"
    text = OmegaConf.to_yaml(OmegaConf.create(part))
    return f"# @package {package}\n{text}" if package else text


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options with their values, and the other words."""
    left, options, overrides = iter(words), {}, []
    for word in left:
        if word in _WITH_VALUE:
            options[word] = next(left)
        elif word.startswith("-"):
            options[word] = ""
        else:
            overrides.append(word)
    return options, overrides


def _folders(options: Mapping[str, str]) -> list[Path]:
    """The folder that options add to those with configurations, if they do."""
    folders = [Path(options[key]) for key in ("--config-dir", "-cd") if key in options]
    for folder in folders:
        if not folder.is_dir():
            raise UserError([f"--config-dir {folder}: no such folder"])
    return folders


def _is_own(word: str) -> bool:
    """Whether a word is not one that Hydra alone carries out."""
    hydras = re.match(r"[+~]*hydra\b|.*\$\{(now|hydra|python_version)\b", word)
    return not hydras or bool(_OWN_SETTINGS.match(word))


def _by_hydra(options: Mapping[str, str], overrides: Sequence[str], root: str) -> None:
    """Sweeps, and all else that options of Hydra's ask for."""
    import hydra

    from pagedsim.run.multirun import conclude, over, refuse_sweep, run_experiment
    from pagedsim.spec.conf import first_line, refuse_unknown_of_hydra, register
    from pagedsim.spec.words import refuse_unreadable

    register()
    folders = _folders(options)
    chosen_root = options.get("--config-name", options.get("-cn", "")).removesuffix(".yaml")
    searched = any(word.startswith("hydra.searchpath") for word in overrides)
    if chosen_root and not searched:
        _refuse_no_root(chosen_root, folders)
    for word in overrides:
        refuse_unreadable(word)
    refuse_unknown_of_hydra([word for word in overrides if re.match(r"[+~]*hydra\b", word)])
    many = bool({"-m", "--multirun"} & options.keys())
    if many and not chosen_root and not searched:  # else Hydra alone knows what they are
        refuse_sweep([word for word in overrides if _is_own(word)], folders)
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path="pkg://pagedsim.conf", config_name=root)
    def study(config: DictConfig) -> None:
        try:
            run_experiment(config)
        except Exception as error:  # Hydra would print words of its own around it
            failures.append(error)

    try:
        study()
    except KeyboardInterrupt:
        conclude(interrupted=True)
        raise
    except OSError as error:  # a study's own errors are in `failures`
        if error.filename is None:  # not of a file: Hydra found no such root
            raise UserError([first_line(error)]) from error
        key = "hydra.sweep.dir" if many else "hydra.run.dir"
        why = f"cannot be written: {error.strerror or error}"
        raise UserError([f"{key}={error.filename}: {why}"]) from error
    except Exception as error:  # a launcher's, of jobs whose processes died
        conclude(died=error)
        if type(error).__module__.partition(".")[0] in ("hydra", "omegaconf"):
            raise UserError([first_line(error)]) from error
        raise
    finally:
        over()
    conclude()
    if failures:
        raise failures[0]


def _refuse_no_root(root: str, folders: Sequence[Path]) -> None:
    """Raise UserError for a root of the user's that is in none of the folders."""
    from pagedsim.spec.conf import Conf

    if not any(place.joinpath(f"{root}.yaml").is_file() for place in Conf(folders).folders):
        where = f"in {folders[0]}" if folders else "here: --config-dir FOLDER says where to look"
        raise UserError([f"--config-name {root}: there is no {root}.yaml {where}"])


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
            known = [option for option in (*_FLAGS, *_WITH_VALUE) if option.startswith("--")]
            raise UserError([f"{word}: no such option; {choices(name, known)}"])
    if {"-m", "--multirun"} & {*options} and {"--cfg", "-c"} & {*options}:
        raise UserError(["--cfg: shows the configuration of a single run, without -m"])
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


def command(words: Sequence[str]) -> Callable[[], None]:
    """What the words of a command line ask for."""
    root = "config"
    if words[:1] == ["policies"] or words in (["--help", "policies"], ["-h", "policies"]):
        page = _policies([word for word in words if word != "policies"])
        return lambda: print(page)
    if words[:1] == ["cite"]:
        from pagedsim.run.cite import cite

        return lambda: print(cite(words[1:]))
    if words[:1] == ["figures"]:
        from pagedsim.run.cite import FIGURES_HELP, words_that_draw

        if len(words) < 2 or {"--help", "-h"} & set(words):
            return lambda: print(FIGURES_HELP)
        return partial(run, in_order(words_that_draw(words[1:])), root, draws=True)
    if (at := _place("serve", words)) is not None:
        from pagedsim.serve.command import completed

        words, root = completed([*words[:at], *words[at + 1 :]]), "serve"
    elif (at := _place("bench", words)) is not None:
        from pagedsim.run.help import BENCH_HELP, bench_words

        if {"--help", "-h"} & set(words):
            return lambda: print(BENCH_HELP)
        words = bench_words([*words[:at], *words[at + 1 :]])
    else:
        _refuse_no_command(words)
    ordered = in_order(words)
    if "--version" in words:
        return _print_version
    if {"--help", "-h"} & set(words):
        from pagedsim.run.help import manual_page

        return lambda: print(manual_page(root))  # Hydra would list its own groups first
    sys.argv[1:] = ordered  # for Hydra
    return partial(run, ordered, root)


def _print_version() -> None:
    from pagedsim.run.provenance import built, in_words

    print(f"pagedsim {in_words()}, {built()}")


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
        wrapped = TextIOWrapper(
            BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, wrapped)


def main() -> None:
    """`python -m pagedsim`."""
    _outlive_pipes()
    gc.set_threshold(_ALLOCATIONS)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # numpy's threads wait asleep
    if os.getcwd() not in sys.path:  # where a policy of one's own lies
        sys.path.insert(0, os.getcwd())
    code = guarded(lambda: command(sys.argv[1:])())
    gc.freeze()  # Python would look through all of it once more, to end
    sys.exit(code)


if __name__ == "__main__":
    main()
