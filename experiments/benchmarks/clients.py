"""Third-party benchmark clients on our server, beside the server's own metrics.

    python -m experiments.benchmarks.clients --guidellm guidellm --aiperf aiperf

Both are on PyPI, best installed in virtual environments of their own; the options name their
programs. The server is `backend=sim`: Llama 3.1 8B on an L4, in real time. Each client sends the
same load, identical requests at fixed intervals, and so does `python -m pagedsim bench`. The
clients make prompts of so many tokens of a small tokenizer, which is trained here on the pages of
docs/ and which the server uses, too. The server's means are from the sums and counts of /metrics
before and after each client.

A client's TTFT includes the connection, which does not grow with the model. TPOT is left out:
guidellm counts the first token in it, vLLM and pagedsim do not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from experiments.benchmarks.harness import ROOT, Parser, positive_float, positive_int, row, table
from experiments.child import listening

MODEL = "llama-3.1-8b"
SERVER = (f"model={MODEL}", "hardware=l4")
PAGES = ROOT / "docs"
VOCABULARY = 2048
SECONDS = 600
"""The limit for a client to end."""
MEANS = {
    "TTFT": "time_to_first_token_seconds",
    "ITL": "inter_token_latency_seconds",
    "E2E": "e2e_request_latency_seconds",
}
"""The metrics compared, with their names on the server."""

Found = dict[str, float]
"""Means in milliseconds, and the output rate under "tokens/s"."""


@dataclass(frozen=True)
class Load:
    """Identical requests at fixed intervals."""

    requests: int
    rate: float
    prompt: int
    output: int


Client = Callable[[str, str, str, Load, Path], Found]
"""Takes its program, the endpoint, the server's address, the load, and a folder for its files that
contains `tokenizer`."""


# -- clients ---------------------------------------------------------------------------------------


def guidellm(program: str, endpoint: str, url: str, load: Load, folder: Path) -> Found:
    """The report of `guidellm run`."""
    report = folder / "guidellm.json"
    _run(
        *(program, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},request_format=/v1/{endpoint}"),
        *("--profile", f"kind=constant,rate={load.rate}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={folder / 'tokenizer'}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={load.prompt},output_tokens={load.output}",
        *("--output", f"kind=json,path={report}"),
    )
    metrics = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]
    found = {name: one["successful"]["mean"] for name, one in metrics.items() if _is_summary(one)}
    return {
        "TTFT": found["time_to_first_token_ms"],
        "ITL": found["inter_token_latency_ms"],
        "E2E": found["request_latency"] * 1e3,
        "tokens/s": found["output_tokens_per_second"],
    }


def _is_summary(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("successful"), dict)


def aiperf(program: str, endpoint: str, url: str, load: Load, folder: Path) -> Found:
    """The report of `aiperf profile`."""
    kind = "chat" if endpoint == "chat/completions" else endpoint
    _run(
        *(program, "profile", "--url", url, "--model", MODEL, "--endpoint-type", kind),
        *("--streaming", "--ui", "none", "--use-server-token-count", "--no-gpu-telemetry"),
        *("--tokenizer", str(folder / "tokenizer"), "--artifact-dir", str(folder / "aiperf")),
        *("--request-rate", str(load.rate), "--request-rate-mode", "constant"),
        *("--request-count", str(load.requests), "--extra-inputs", "ignore_eos:true"),
        *("--synthetic-input-tokens-mean", str(load.prompt)),
        *("--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(load.output), "--output-tokens-stddev", "0"),
    )
    report = folder / "aiperf" / "profile_export_aiperf.json"
    metrics = json.loads(report.read_text(encoding="utf-8"))
    return {
        "TTFT": metrics["time_to_first_token"]["avg"],
        "ITL": metrics["inter_token_latency"]["avg"],
        "E2E": metrics["request_latency"]["avg"],
        # Its own throughput also counts the time before its first request is due.
        "tokens/s": metrics["total_output_tokens"]["avg"] / metrics["benchmark_duration"]["avg"],
    }


def bench(program: str, endpoint: str, url: str, load: Load, folder: Path) -> Found:
    """The report of `python -m pagedsim bench`."""
    out = folder / "bench"
    _run(
        *(program, "-m", "pagedsim", "bench", f"url={url}", "workload=fixed"),
        *(f"workload.requests={load.requests}", f"workload.rate={load.rate}"),
        *(f"workload.lengths.prompt={load.prompt}", f"workload.lengths.output={load.output}"),
        *("workload.max_len=null", "backend.warmup=0"),
        f"backend.endpoint={endpoint.partition('/')[0]}",
        *("tracking=none", "report=false", f"hydra.run.dir={out}"),
    )
    (report,) = out.rglob("vllm_bench.json")
    metrics = json.loads(report.read_text(encoding="utf-8"))
    return {
        "TTFT": metrics["mean_ttft_ms"],
        "ITL": metrics["mean_itl_ms"],
        "E2E": metrics["mean_e2el_ms"],
        "tokens/s": metrics["output_throughput"],
    }


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-2000:]}\n{words[0]} failed")


# -- the server ------------------------------------------------------------------------------------

Totals = dict[str, tuple[float, float]]
"""Sum and count of each of `MEANS`."""


def totals(url: str) -> Totals:
    """The totals since the server started."""
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    values = dict(re.findall(r"^vllm:(\w+)\{.*?\} (\S+)$", text, re.MULTILINE))
    return {
        name: (float(values[f"{key}_sum"]), float(values[f"{key}_count"]))
        for name, key in MEANS.items()
    }


def means_between(before: Totals, after: Totals) -> Found:
    """The means of the requests in between."""
    return {
        name: (after[name][0] - total) / (after[name][1] - count) * 1e3
        for name, (total, count) in before.items()
    }


def make_tokenizer(folder: Path) -> None:
    """Train a small tokenizer on docs/, with a chat template that only joins the messages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = sorted(PAGES.rglob("*.md"))
    tokenizer.train_from_iterator((page.read_text(encoding="utf-8") for page in pages), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


# -- the table -------------------------------------------------------------------------------------


def rows(name: str, saw: Found, server: Found, base: Found) -> Iterator[list[str]]:
    """A client's means beside the server's of the same requests, and beside those of `bench`."""
    for metric, value in saw.items():
        there = server.get(metric)
        cells = ["", "", ""]
        if there:
            cells = [f"{there:.2f}", f"{value - there:+.2f}", _more(value, there)]
        yield [name, metric, f"{value:.2f}", *cells, _more(value, base[metric])]


def _more(value: float, than: float) -> str:
    return f"{value / than - 1:+.2%}"


def main(words: Sequence[str] | None = None) -> None:
    """Print each client's means beside the server's."""
    parser = Parser(__doc__)
    parser.add_argument("--guidellm", help="its program; without it, it is left out")
    parser.add_argument("--aiperf", help="the same")
    parser.add_argument("--endpoint", default="completions", help="or chat/completions")
    parser.add_argument("--requests", type=positive_int, default=40)
    parser.add_argument("--rate", type=positive_float, default=0.5, help="requests/s")
    parser.add_argument("--prompt", type=positive_int, default=4096, help="tokens")
    parser.add_argument("--output", type=positive_int, default=64, help="tokens")
    asked = parser.parse_args(words)
    load = Load(asked.requests, asked.rate, asked.prompt, asked.output)
    clients: list[tuple[str, Client, str | None]] = [
        ("bench", bench, sys.executable),
        ("guidellm", guidellm, asked.guidellm),
        ("aiperf", aiperf, asked.aiperf),
    ]
    print(
        f"{load.requests} requests at {load.rate:g}/s on /v1/{asked.endpoint}: "
        f"{load.prompt} tokens in, {load.output} out; times in ms\n"
    )
    head = ["client", "mean of", "it sees", "server", "apart", "", "to bench"]
    print(table(head, []), flush=True)
    with TemporaryDirectory() as name:
        make_tokenizer(Path(name) / "tokenizer")
        with listening(*SERVER, f"tokenizer={Path(name) / 'tokenizer'}") as child:
            base: Found = {}
            for client_name, client, program in clients:
                if program is not None:
                    before = totals(child.url)
                    saw = client(program, asked.endpoint, child.url, load, Path(name))
                    base = base or saw
                    server = means_between(before, totals(child.url))
                    print(*map(row, rows(client_name, saw, server, base)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
