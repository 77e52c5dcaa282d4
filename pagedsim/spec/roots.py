"""The roots of `conf/`: what every experiment and every server has, with kinds and defaults.

The groups (policy, memory, model, …) are open: what they hold is checked by the object that they
build. Everything else is refused by `spec.check` if it is misspelt or of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import OmegaConf

from pagedsim.spec.check import Whole

PositiveInt = Annotated[int, Whole(1)]

OF_THE_STUDY = ("study", "tracking", "report", "figures", "jobs", "seed", "seeds")
"""Keys that change no run of an arm, or are part of a job: its seed."""
CARRIED = ("tiny", "smollm2")
"""Shapes of conf/model whose weights the engine has, so that it serves them as they are."""


@dataclass
class Server:
    """Limits of the scheduler; null leaves a limit to the model, the memory and the batching."""

    max_seqs: int = 256
    """Sequences in a batch, at most."""
    max_batched_tokens: int | None = None
    """Tokens that one step computes; under batching=unified at least max_seqs, as in vLLM 0.33."""
    max_model_len: int | None = None
    """Tokens of one request, prompt and answer; null: the model's own limit, if memory holds it."""
    async_scheduling: bool = False
    """Whether a step is planned while the one before runs."""


@dataclass
class Slo:
    """What a request must meet to count as goodput, in seconds; null: no bound."""

    ttft: float | None = None
    """From the arrival to the first token."""
    tpot: float | None = None
    """From one token to the next, on average over the answer."""
    e2e: float | None = None
    """From the arrival to the last token."""
    clients: dict[str, Any] = field(default_factory=dict)
    """Bounds of single clients, as in +slo.clients.chat.ttft=0.5; what one lacks is as for all, and
    null is no bound."""


@dataclass
class Qoe:
    """What readers expect, for the metric qoe. Andes' for text chat (2404.16283): a first token as
    soon as a web page is to be there, 1.3 s, and the speed at which people read, 4.8 tokens/s."""

    ttft: float = 1.3
    """Seconds to the first token."""
    tokens_per_s: float = 4.8
    """Reading speed."""


@dataclass
class Root:
    """What the configurations of a study and of a server have in common."""

    policy: Any = None
    preemption: Any = None
    batching: Any = None
    memory: Any = None
    offload: Any = None
    model: Any = None
    hardware: Any = None
    stack: Any = None
    cost: Any = None
    backend: Any = None
    server: Server = field(default_factory=Server)
    tensor_parallel: PositiveInt = 1
    """GPUs that share the model, or a stage of it."""
    pipeline_parallel: PositiveInt = 1
    """Stages to which the layers are dealt; backend=sim only."""
    expert_parallel: PositiveInt = 1
    """GPUs of a stage over which a mixture's experts are dealt, a multiple of tensor_parallel; each
    tensor_parallel of them are a group with requests of its own, and server.max_seqs,
    server.max_batched_tokens and memory.blocks are each group's, as in vLLM. backend=sim only;
    cost.expert_skew is how much more often than average the busiest GPU's experts are chosen."""
    kv_cache_dtype: str = "auto"
    """What the cache holds of keys and values: auto, as the model has them, fp8 (fp8_e4m3) or
    fp8_e5m2."""
    quantization: str | None = None
    """What the layers' weights are held in: int8, fp8, or null: as the model has them."""
    seed: Annotated[int, Whole(0)] = 0
    """The first seed of a study; the others follow it. The same seed gives the same bytes. Of a
    server, for what is sampled where a request has no seed of its own."""


@dataclass
class Config(Root):
    """The root of a study's configuration."""

    workload: Any = None
    predictor: Any = None
    fleet: Any = None
    router: Any = None
    tracking: Any = None
    study: Any = None
    slo: Slo = field(default_factory=Slo)
    qoe: Qoe = field(default_factory=Qoe)
    run: str | None = None
    """The folder of an earlier study, for experiments that take it up."""
    requests: Any = None
    """The log of an outside server's requests, for experiments that fit to it or predict it; to
    fit to, also a list of logs."""
    fit: str | None = None
    """The folder of an experiment that fitted to such a log, for the one that predicts another."""
    record: str | None = None
    """Where the experiment that puts load on a server leaves a log of its requests."""
    prompt: int | None = None
    """Tokens of a prompt, for experiment=estimate."""
    batch: int | None = None
    """Sequences that decode together, for experiment=estimate."""
    seeds: PositiveInt = 3
    """How often each arm is run, each time with other requests."""
    jobs: PositiveInt | None = None
    """Processes; null: as many as there are cores, and one where times are measured."""
    report: bool = True
    """Whether to draw plots and write report.html."""
    figures: list[str] = field(default_factory=lambda: ["png"])
    """Formats of the plots: png, pdf, svg."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own, imported first, whose metrics and plots register themselves."""


@dataclass
class Serve(Root):
    """The root of a server's configuration."""

    fleet: Any = None
    router: Any = None
    host: str = "127.0.0.1"
    """Where to listen; 0.0.0.0: on all interfaces."""
    port: int = 8000
    """0: any that is free."""
    hosts: list[str] | None = None
    """Names under which it may be addressed, beside addresses and localhost; null: any, where it
    listens for other machines, and none where it does not."""
    name: str | None = None
    """What clients call the model; null: its own name."""
    api_key: str | None = None
    """What clients must present as a bearer token; null: the variable PAGEDSIM_API_KEY, if set."""
    max_waiting: int = 4096
    """Length of the queue; further requests get 429 with Retry-After."""
    max_body: int = 2097152
    """Bytes of a request, at most."""
    timeout: float | None = None
    """Seconds after which a request is given up; null: none."""
    drain: float = 30.0
    """Seconds that open requests have to finish once the server shuts down."""
    speed: float = 1.0
    """backend=sim: seconds of the model that pass in one of ours."""
    answer_tokens: int = 256
    """backend=sim: tokens of an answer where the client sets no bound."""
    tokenizer: str | None = None
    """backend=sim: whose tokens prompts are counted in, a folder; null: a token is four bytes."""


def _stand_in(*, _root_: Any) -> str:
    """What the engine serves on a CPU: the group's model if it has its weights, else tiny."""
    name = OmegaConf.select(_root_, "model.name", default=None)
    return name if name in CARRIED else "tiny"


def _by_gpu(table: Mapping[str | int, Any], *, _root_: Any) -> Any:
    """A default that depends on the GPU: the first entry whose key begins its name, or is at most
    its GiB of memory."""
    hardware = OmegaConf.select(_root_, "hardware", default=None) or {}
    name, memory = str(hardware.get("name")), hardware.get("memory_gib")
    memory = memory if isinstance(memory, int | float) else 0  # is refused elsewhere
    for key, value in table.items():
        if key <= memory if isinstance(key, int) else name.startswith(key):
            return value
    return None


def register_resolvers() -> None:
    """Register the resolvers of `${by_gpu:...}` and `${stand_in:}`."""
    OmegaConf.register_new_resolver("stand_in", _stand_in, replace=True)
    OmegaConf.register_new_resolver("by_gpu", _by_gpu, replace=True)
