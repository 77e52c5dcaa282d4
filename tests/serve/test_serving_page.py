"""docs/serving.md, tried on a server: its calls are answered, its paths and fields are there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from pagedsim.serve.api.schema import ChatRequest, CompletionRequest, Sampling
from pagedsim.serve.metrics import Metrics
from tests.serve.serving import Server, paced, serving

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://localhost:8000"


def blocks(language: str, *pages: str) -> list[str]:
    """Blocks of the pages that ask a server."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [found for page in pages for found in fence.findall(page) if ADDRESS in found]


CALLS = [line for block in blocks("bash", TEXT) for line in block.splitlines() if "curl" in line]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    metrics = Metrics()
    with serving(paced(metrics=metrics), model="llama-3.1-8b", metrics=metrics) as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_call_with_curl_is_answered(server: Server) -> None:
    assert len(CALLS) >= 4
    for call in CALLS:
        words = call.replace(ADDRESS, server.url).replace("curl -s", "curl -sS --fail-with-body")
        done = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, ""), f"{call}: {done.stdout}"
        assert done.stdout.startswith("{"), call


@pytest.mark.parametrize("code", blocks("python", TEXT, README))
def test_every_client_in_python_is_answered(
    server: Server, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code.replace(ADDRESS, server.url), "docs/serving.md", "exec"), {})
    assert " 1 2 3" in capsys.readouterr().out


def test_there_are_clients_in_python() -> None:
    assert blocks("python", TEXT)


def test_every_path_of_the_table_is_one_of_the_server(server: Server) -> None:
    named = re.findall(r"`(GET|POST) (/[^`]*)`", TEXT)
    there = {
        (method.upper(), path.replace("{name}", "{id}"))
        for path, methods in server.app.openapi()["paths"].items()
        for method in methods
    }
    assert len(named) > 8
    assert set(named) - there == {("GET", "/")}  # of the live page, which has tests of its own


def test_every_field_that_is_named_is_taken() -> None:
    _, rest = TEXT.split("\n## Fields that policies use\n")
    section = rest.split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    names = re.search(r"Further fields .*?: (.*)\. Requests", section)
    assert names is not None and len(rows) == 5
    fields = {*Sampling.model_fields, *ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert set(rows) | set(re.findall(r"`(\w+)`", names[1])) <= fields


def test_the_named_metrics_are_served(server: Server) -> None:
    told = server.http.get("/metrics").text
    named = set(re.findall(r"vllm:(?!kv_offload)(\w+)", TEXT))  # those of every server
    assert len(named) >= 4
    assert [name for name in named if f"vllm:{name}" not in told] == []
