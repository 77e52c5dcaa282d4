"""The front door: compose the configuration, dispatch to the study, nothing else."""

from __future__ import annotations

import os
import sys

from pagedsim.complaint import Complaint, guarded

_FLAGS = ("-m", "--multirun", "-h", "--help")


def run() -> None:
    """Hydra's entry; imported late, so that nothing is before the guard against errors."""
    import hydra
    from omegaconf import DictConfig, OmegaConf

    from pagedsim.config import register

    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
    def study(config: DictConfig) -> None:
        from experiments.run import run_experiment

        try:
            run_experiment(config)
        except Exception as error:  # Hydra would print words of its own around it
            failures.append(error)

    register()
    OmegaConf.register_new_resolver("manual", _manual, replace=True)
    try:
        study()
    except KeyboardInterrupt:
        _conclude(interrupted=True)
        raise
    except OSError as error:  # a study's own errors are in `failures`
        if error.filename is None:
            raise  # not of a file: Hydra found no such option
        key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(sys.argv) else "hydra.run.dir"
        why = f"cannot be written: {error.strerror or error}"
        raise Complaint([f"{key}={error.filename}: {why}"]) from error
    finally:
        _over()
    _conclude()
    if failures:
        raise failures[0]


def _manual() -> str:
    from experiments.manual import page

    return page()


def _over() -> None:
    """Take down what a sweep shows while it runs."""
    if "experiments.multirun" in sys.modules:  # else none has begun
        from experiments.multirun import Multirun

        Multirun.over()


def _conclude(interrupted: bool = False) -> None:
    """End a sweep, if there was one."""
    from experiments.multirun import conclude

    conclude(interrupted)


def main() -> None:
    """`python -m pagedsim`."""
    if os.getcwd() not in sys.path:  # where a policy of one's own lies
        sys.path.insert(0, os.getcwd())
    # Options may stand anywhere; argparse would have them before or after all the others.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in _FLAGS)
    sys.exit(guarded(run))


if __name__ == "__main__":
    main()
