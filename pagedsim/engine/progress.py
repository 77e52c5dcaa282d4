"""How far a list of prompts has come, on a terminal."""

from __future__ import annotations

from tqdm import tqdm  # type: ignore[import-untyped]

from pagedsim.engine.output import RequestOutput


class Progress:
    """A bar of the prompts that are answered, with tokens a second of prompts and of answers."""

    def __init__(self, prompts: int, *, disable: bool) -> None:
        self._bar = tqdm(
            total=prompts,
            desc="Processed prompts",
            unit="prompt",
            postfix=speed(0, 0, 0.0),
            dynamic_ncols=True,
            disable=disable,
        )
        self._read = self._said = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def answered(self, output: RequestOutput) -> None:
        """One more is finished."""
        if self._bar.disable:
            return
        self._read += len(output.prompt_token_ids)
        self._said += sum(len(one.token_ids) for one in output.outputs)
        elapsed = self._bar.format_dict["elapsed"]
        self._bar.set_postfix_str(speed(self._read, self._said, elapsed), refresh=False)
        self._bar.update()


def speed(read: int, said: int, seconds: float) -> str:
    """Tokens a second, in vLLM's words, which tools read.

    >>> speed(100, 20, 2.0)
    'est. speed input: 50.00 toks/s, output: 10.00 toks/s'
    """
    rates = (tokens / seconds if seconds else 0.0 for tokens in (read, said))
    return "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*rates)
