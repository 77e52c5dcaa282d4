"""A router of the simulator before servers over HTTP: it decides as there, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from pagedsim.backends.base import StoppableRecorder
from pagedsim.core import ConfigError, Request, SamplingParams
from pagedsim.serve.metrics import Metrics
from pagedsim.serve.router.servers import ServerView, Unpublished, published
from pagedsim.spec.composed import Composed
from pagedsim.spec.run import RunSpec
from tests.run.http.fake import Fake
from tests.run.http.fake import serving as faking
from tests.serve.routers import ALIKE, Routed, before, numbers, routing, spec_of
from tests.serve.serving import Answer, ask, paced, serving, until

OWN = "router._target_=tests.serve.routers.ByLength"
ODD = "router._target_=tests.serve.routers.Odd"

# -- it decides as in a simulation -----------------------------------------------------------------

PROMPTS = [[number % 3 + 3] * (160 if number % 3 else 70) for number in range(14)]
"""Of three kinds, each with a prefix of its own."""
SESSION = [f"session {number % 4}" for number in range(len(PROMPTS))]


class Long:
    """Requests that come one after the other, and all stay."""

    mode, users, think_time, turns = "open", None, 0.0, None

    def requests(self) -> Iterator[tuple[Request, int]]:
        for number, prompt in enumerate(PROMPTS):
            params, session = SamplingParams(max_tokens=1000), SESSION[number]
            yield Request(number, prompt, params, arrival=number * 1e-3, session=session), 1000


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Four servers whose answers take long."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(serving(paced(speed=1.0, metrics=m), metrics=m)).url
            for m in (Metrics() for _ in range(4))
        ]


@pytest.mark.parametrize(
    "words",
    [
        ("router=round_robin",),
        ("router=least_requests",),
        ("router=sticky", "router.bound=null"),
        ("router=prefix_aware",),
        (OWN,),
        (OWN, "+router.long=50"),
    ],
    ids=" ".join,
)
def test_requests_go_where_they_do_in_a_simulation(urls: list[str], words: tuple[str, ...]) -> None:
    recorder = StoppableRecorder()
    simulated: Any = RunSpec(
        Composed.of([*ALIKE, "fleet.replicas=4", *words]).resolved(), 0
    ).prepare()
    simulated.run(Long(), recorder)
    wanted = recorder.requests_table().sort_by("request")["replica"].to_pylist()
    served = asyncio.run(places(urls, words))
    assert served == [f"replica-{index}" for index in wanted]
    assert len(set(served)) > 1


async def places(urls: list[str], words: tuple[str, ...]) -> list[str]:
    """The server of each request, sent while those before it run."""
    names = list[str]()
    with routing(urls, *words) as routed:
        async with httpx.AsyncClient(base_url=routed.url, timeout=60) as client:
            streams = list[httpx.Response]()
            for prompt, session in zip(PROMPTS, SESSION, strict=True):
                body = {"prompt": prompt, "max_tokens": 1000, "stream": True}
                request = client.build_request(
                    "POST", "/v1/completions", json=body, headers={"x-session-id": session}
                )
                streams.append(await client.send(request, stream=True))
                names.append(streams[-1].headers["x-replica"])
            for stream in streams:
                await stream.aclose()
        until(lambda: not routed.listener.front.unfinished)
    return names


# -- what it sees ----------------------------------------------------------------------------------

VLLM = """
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",mamba_block_size="8",num_gpu_blocks="100"} 1.0
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} 7.0
"""
SGLANG = """
sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.5
sglang:max_total_num_tokens{model_name="m"} 4096.0
"""
OURS = {"waiting": 0, "running": 0, "swapped": 0, "usage": 0, "block_size": 16, "total_blocks": 256}


def test_metrics_are_read_under_the_names_of_vllm_sglang_and_ours(urls: list[str]) -> None:
    assert published(VLLM) == {
        **{"running": 5, "waiting": 1, "usage": 0.25},
        **{"block_size": 16, "total_blocks": 100},
    }
    assert published(SGLANG) == {
        **{"running": 4, "waiting": 2, "usage": 0.5},
        **{"block_size": 1, "total_blocks": 4096},
    }
    limits = {"max_seqs": 256, "max_batched_tokens": 2048}
    assert published(httpx.get(f"{urls[0]}/metrics").text).keys() == (OURS | limits).keys()


def view(old: bool) -> ServerView:
    """A server with four requests, the first of which decodes."""
    server = ServerView(0, "replica-0", "http://a", None, old)
    for number in range(4):
        params = SamplingParams(max_tokens=30)
        server.sent[number] = Request(number, [5] * 10 * (number + 1), params)
    server.sent[0]._first_token_at, server.sent[0]._generated = 1.0, 5
    server.whole.add(1)
    server.told = published(VLLM)
    return server


def test_a_server_has_what_was_sent_there_and_not_answered() -> None:
    server = view(old=False)
    server.told = {**published(VLLM), "running": 2}
    assert (server.requests, server.running, server.waiting, server.swapped) == (4, 2, 2, 0)
    assert (server.free_blocks, server.wanted_blocks) == (75, 2 + 3)  # of 30 and 40 tokens
    assert server.owed_tokens == 30 + 40  # the second one may have begun, which does not show
    assert server.stored_tokens == 10 + 5 + 20
    assert server.predicted_tokens == 4 * 30 - 5
    assert [request.id for request in server.batch] == [0, 1]
    del server.sent[3]
    assert (server.requests, server.running, server.waiting) == (3, 2, 1)


def test_with_stale_counts_a_server_has_the_requests_of_the_last_look() -> None:
    server = view(old=True)
    server.sent.clear()
    assert (server.requests, server.running, server.waiting) == (6, 5, 1)


@pytest.mark.parametrize("name", ["max_seqs", "decode_seconds", "waiting", "free_blocks"])
def test_what_a_server_does_not_publish_is_refused_by_name(name: str) -> None:
    server: Any = ServerView(0, "replica-0", "http://a", None, False)
    server.told = {"total_blocks": 3.0}
    with pytest.raises(Unpublished, match="which http://a does not publish"):
        getattr(server, name)(1, 1) if name == "decode_seconds" else getattr(server, name)


def test_a_router_is_refused_at_the_start_for_what_servers_do_not_publish(fake: Fake) -> None:
    with pytest.raises(ConfigError, match=r"^router: LlmD reads running, which http:.* not"):
        asyncio.run(before([fake.url], "router=llm_d").serve([]))
    fake.metrics = VLLM
    with routing([fake.url], "router=llm_d") as routed:
        assert routed.post(prompt="a", max_tokens=2).status_code == 200


def test_a_server_that_is_described_has_the_sizes_and_step_times_of_its_simulation() -> None:
    like = spec_of("server.max_seqs=7").prepare()
    server = ServerView(0, "replica-0", "http://a", like, False)  # type: ignore[arg-type]
    assert server.max_seqs == 7 and server.total_blocks > 0
    assert server.prefill_seconds(100) > server.decode_seconds(1, 100) > 0


def test_nobody_answers_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"^router.backends: none answers: http://127.0.0.1:9$"):
        asyncio.run(before(["http://127.0.0.1:9"]).serve([]))


def test_a_server_that_lists_no_models_is_refused_at_the_start(fake: Fake) -> None:
    error = rf"^router.backends: {fake.url}/v1/models: 404, '': must be a list of models"
    fake.models = 404
    with pytest.raises(ConfigError, match=error):
        asyncio.run(before([fake.url]).serve([]))
    fake.models = 401  # clients have the key
    with routing([fake.url]) as routed:
        assert streamed(routed, max_tokens=2).whole


def test_servers_of_other_models_are_refused_at_the_start(two: tuple[Fake, Fake]) -> None:
    two[1].model = "other"
    error = rf"^router.backends: must .*: {two[0].url} has fake; {two[1].url} has other$"
    with pytest.raises(ConfigError, match=error):
        asyncio.run(before([fake.url for fake in two]).serve([]))


def test_a_server_that_is_down_at_the_start_is_named(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    with routing([fake.url, "http://127.0.0.1:9"]) as routed:
        assert [streamed(routed, max_tokens=2).whole for _ in range(2)] == [True, True]
    assert "replica-1 at http://127.0.0.1:9 does not answer" in capsys.readouterr().err


# -- what becomes of requests ----------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[tuple[Fake, Fake]]:
    with faking(Fake()) as first, faking(Fake()) as second:
        yield first, second


def streamed(routed: Routed, **body: Any) -> Answer:
    return asyncio.run(ask(routed.url, prompt=[5, 6, 7], **body))


def test_a_request_without_an_answer_goes_to_another_server(two: tuple[Fake, Fake]) -> None:
    two[0].fails = lambda number, body: 503
    with routing([fake.url for fake in two]) as routed:
        assert routed.post(prompt="a").status_code == 503  # it takes requests, but not this one
        two[0].health = 503
        assert streamed(routed, max_tokens=3).whole  # at the second, whose turn it is
        until(lambda: routed.up == [False, True])
        two[0].health = 200
        until(lambda: routed.up == [True, True])
        two[0].health = 503  # it shuts down, which no look has seen
        answers = [streamed(routed, max_tokens=3) for _ in range(2)]
        assert [(answer.text, answer.whole) for answer in answers] == [(" x x x", True)] * 2
        assert routed.retries <= 1 and len(two[1].asked) == 3


def test_a_stream_goes_on_at_another_server_where_it_broke_off(two: tuple[Fake, Fake]) -> None:
    two[0].fails = lambda number, body: 0
    with routing([fake.url for fake in two]) as routed:
        answer = streamed(routed, max_tokens=4)
        assert (answer.text, answer.tokens, answer.whole) == (" x x x x", 4, True)
        assert (answer.error, answer.reason, routed.retries) == ("", "length", 1)
        said = numbers(httpx.get(f"{routed.url}/metrics").text)
        assert said['requests_total{replica="replica-1"}'] == 1
        assert said['requests_in_flight{replica="replica-0"}'] == said["requests_held"] == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [((), "another one answers otherwise"), (("fleet.max_retries=0",), "died under it more than")],
)
def test_a_stream_that_cannot_go_on_ends_with_an_error(
    two: tuple[Fake, Fake], words: tuple[str, ...], error: str
) -> None:
    two[0].fails, two[1].together = lambda number, body: 0, 2
    two[1].text = " y"
    with routing([fake.url for fake in two], *words) as routed:
        answer = streamed(routed, max_tokens=4)
    assert (answer.status, answer.text, answer.whole) == (200, " x", True)
    assert error in answer.error


def test_requests_wait_while_no_server_is_up(fake: Fake) -> None:
    with routing([fake.url], "max_waiting=1") as routed:
        fake.health = 503
        until(lambda: routed.up == [False])
        assert httpx.get(f"{routed.url}/health").status_code == 503

        async def both() -> tuple[Answer, Answer]:
            first = asyncio.create_task(ask(routed.url, prompt="a", max_tokens=2))
            while not routed.listener.front.dispatch.held:
                await asyncio.sleep(0.01)
            second = await ask(routed.url, prompt="a", max_tokens=2)
            fake.health = 200
            return await first, second

        first, second = asyncio.run(both())
    assert (first.whole, second.status) == (True, 429)


def test_a_router_that_holds_requests_is_asked_again_when_one_has_left(fake: Fake) -> None:
    fake.metrics, fake.delay = VLLM, 0.02
    with routing([fake.url], "router=central", "router.slots=1") as routed:

        async def three() -> list[Answer]:
            asked = (ask(routed.url, prompt="a", max_tokens=3) for _ in range(3))
            return list(await asyncio.gather(*asked))

        assert all(answer.whole for answer in asyncio.run(three()))
    assert fake.most_at_once == 1


def test_a_client_that_leaves_frees_its_place(fake: Fake) -> None:
    fake.delay = 0.1
    with routing([fake.url]) as routed:
        asyncio.run(ask(routed.url, leave_after=0.3, prompt="a", max_tokens=1000))
        until(lambda: not routed.listener.front.unfinished and not fake.at_once)
        assert not routed.listener.front.dispatch.servers[0].sent


def test_requests_finish_at_the_end_and_the_rest_is_told(fake: Fake) -> None:
    fake.delay = 0.05
    with routing([fake.url]) as routed:

        async def ending() -> list[Answer]:
            long, short = Answer(), Answer()
            asked = [
                asyncio.create_task(ask(routed.url, answer=answer, prompt="a", max_tokens=tokens))
                for answer, tokens in ((long, 1000), (short, 6))
            ]
            await asyncio.gather(long.begun.wait(), short.begun.wait())
            routed.listener.should_exit = True
            await asyncio.sleep(0.3)
            late = await ask(routed.url, prompt="a", max_tokens=1)
            return [late, *(await asyncio.gather(*asked))]

        late, long, short = asyncio.run(ending())
    assert (late.status, late.tokens) == (503, 0)
    assert (short.whole, short.error, short.tokens) == (True, "", 6)
    assert long.whole and "the server is shutting down" in long.error


@pytest.mark.parametrize(
    ("tokens", "status", "error"),
    [
        (1, 503, "Odd has refused the request: too short"),
        (2, 500, "Odd.route gave 'replica-0': must be one of the replicas that it was given"),
        (3, 500, "Odd: KeyError: 'three'"),
    ],
)
def test_what_a_router_of_ones_own_does_wrong_is_told_to_that_request(
    fake: Fake, tokens: int, status: int, error: str
) -> None:
    with routing([fake.url], ODD) as routed:
        answer = routed.post(prompt=[7] * tokens, max_tokens=1)
        assert answer.status_code == status
        assert error in answer.json()["error"]["message"]
        assert routed.post(prompt=[7] * 4, max_tokens=1).status_code == 200


def test_a_key_is_asked_for_and_stays_here(fake: Fake) -> None:
    with routing([fake.url], key="secret") as routed:
        body = {"prompt": "a", "max_tokens": 1}
        path = f"{routed.url}/v1/completions"
        assert httpx.post(path, json=body).status_code == 401
        headers = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
        assert httpx.post(path, json=body, headers=headers).status_code == 200
        assert httpx.get(f"{routed.url}/v1/models", headers=headers).json()["data"]
        assert httpx.get(f"{routed.url}/result/a", headers=headers).status_code == 404
    sent = {name.lower(): value for name, value in fake.headers[1].items()}  # behind the start's
    assert sent["x-request-id"] == "mine" and "authorization" not in sent


def test_the_openai_client_streams_a_chat(urls: list[str]) -> None:
    from openai import OpenAI

    with routing(urls, "router=sticky") as routed:
        client = OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0, timeout=30)
        model = client.models.list().data[0].id
        chunks = client.chat.completions.create(
            model=model, max_tokens=3, stream=True, user="me",
            messages=[{"role": "user", "content": "Hello"}],
        )  # fmt: skip
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " 1 2 3"
