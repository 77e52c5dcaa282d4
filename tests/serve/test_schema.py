"""Whatever the server's own OpenAPI page allows, no answer is a fault of the server's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from tests.serve.serving import Server, paced, serving

PATHS = {
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/generate",
    "/result/{name}", "/tokenize", "/detokenize", "/health", "/ping", "/version",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(paced(speed=1e6), max_body=100_000) as server:
        yield server


def test_the_page_describes_every_path(server: Server) -> None:
    page = server.http.get("/openapi.json").json()
    assert set(page["paths"]) == PATHS
    for path, methods in page["paths"].items():
        for method, operation in methods.items():
            assert operation.get("summary") and "422" not in operation["responses"], path
            assert ("requestBody" in operation) is (method == "post")


def tried(server: Server, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        answered(found.ok(), examples)


def answered(operation: schemathesis.APIOperation, examples: int) -> None:
    @given(data=st.data())
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def answers(data: st.DataObject) -> None:
        modes = list(schemathesis.GenerationMode)
        case = data.draw(operation.as_strategy(data.draw(st.sampled_from(modes))))
        case.call_and_validate(checks=[not_a_server_error], timeout=30)

    answers()


def test_no_request_of_its_kind_is_answered_with_a_fault(server: Server) -> None:
    tried(server, 12)


@pytest.mark.slow
def test_nor_are_many(server: Server) -> None:
    tried(server, 400)
