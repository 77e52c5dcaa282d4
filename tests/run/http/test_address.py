"""A server that is not there, or does not say what it serves, gives one line."""

from __future__ import annotations

import pytest

from pagedsim.core import ConfigError
from pagedsim.run.http.client import Address, base_of
from tests.run.http.fake import Fake, serving


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000"),
        ("host:8000/v1/", "http://host:8000"),
        ("https://host/llm/v1", "https://host/llm"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert base_of(url) == base


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://h?a=b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match=r"backend\.url=.*: must be an address such as"):
        base_of(url)


def test_a_key_does_not_belong_into_an_address_and_is_not_told() -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is for keys") as told:
        base_of("http://me:secret@host")
    assert "secret" not in str(told.value)


def test_the_model_is_the_first_that_is_served_unless_it_is_named(fake: Fake) -> None:
    assert Address.found(fake.url, None).model == "fake"
    assert Address.found(fake.url, "mine").model == "mine"


def test_a_server_without_a_list_of_models_serves_one_that_is_named(fake: Fake) -> None:
    fake.models = 404
    assert Address.found(fake.url, "mine").model == "mine"
    with pytest.raises(ConfigError, match="gives HTTP 404; name the model"):
        Address.found(fake.url, None)


def test_a_key_is_asked_for_by_its_variable(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    Address.found(fake.url, None)
    assert fake.headers[-1]["Authorization"] == "Bearer sesame"
    fake.models = 401
    with pytest.raises(ConfigError, match=r"refuses us \(HTTP 401\)") as told:
        Address.found(fake.url, "mine")
    assert "sesame" not in str(told.value)


def test_a_key_goes_to_no_other_server(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    with serving(Fake()) as other:
        fake.elsewhere = f"{other.url}/v1/models"
        assert Address.found(fake.url, None).model == "fake"
        assert "Authorization" not in other.headers[-1]
    assert fake.headers[-1]["Authorization"] == "Bearer sesame"
