"""The front door: compose the configuration, dispatch to the study, nothing else."""

from __future__ import annotations

import sys

from pagedsim.complaint import guarded


def run() -> None:
    """Hydra's entry; imported late, so that a typing error is answered at once."""
    import hydra
    from omegaconf import DictConfig

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
    study()
    if failures:
        raise failures[0]


def main() -> None:
    """`python -m pagedsim`."""
    sys.exit(guarded(run))


if __name__ == "__main__":
    main()
