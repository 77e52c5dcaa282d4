"""vLLM 0.33's scheduler, once more: plainly, from its rules alone, to be the judge of ours.

It shares no line and no idea with pagedsim.core: the free list is a list that is searched, a
block is named by what it and all before it hold, and every step looks at everything. That it is
right is shown by the recorded workloads, which it reproduces.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Step: TypeAlias = dict[str, Any]
Content: TypeAlias = tuple[int, tuple[int, ...]]  # name of the block before, tokens of this one


@dataclass
class Seq:
    """A request: its tokens, how many of them are computed, and the blocks that hold these.

    What a step under way computes counts as computed; the token that it samples is not in `tokens`
    yet, but is `pending`.
    """

    id: int
    key: tuple[int, int]  # (priority, arrival): smaller goes first
    tokens: list[int]
    end: int  # length at which it ends
    computed: int = 0
    pending: int = 0
    lives: int = 0  # times that it was preempted
    seen: bool = False  # scheduled before
    blocks: list[int] = field(default_factory=list)
    registered: int = 0  # of its blocks, the first ones
    names: list[int] = field(default_factory=list)  # of its full blocks, as far as they were asked

    @property
    def wanted(self) -> int:
        """Tokens to compute until it samples again."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def ends_anyway(self) -> bool:
        """Whether it ends with the tokens that are under way."""
        return self.pending > 0 and len(self.tokens) + self.pending >= self.end


class Work(NamedTuple):
    """What a step computes of one request."""

    seq: Seq
    tokens: int
    samples: bool
    life: int  # of the request, in which the step was planned


class Blocks:
    """The pool: a free list in eviction order, reference counts, and holders by content."""

    def __init__(self, total: int, block_size: int, caching: bool) -> None:
        self.size = block_size
        self.caching = caching
        self.free = list(range(total))
        self.refs = [0] * total
        self.registered: list[int | None] = [None] * total  # block -> name
        self.holders: dict[int, list[int]] = {}  # name -> blocks, the first registered first
        self.known: dict[Content, int] = {}

    def name(self, seq: Seq, index: int) -> int:
        """One number for the content of a full block and of all blocks before it."""
        while len(seq.names) <= index:
            i = len(seq.names)
            before = seq.names[-1] if i else -1
            content = (before, tuple(seq.tokens[i * self.size : (i + 1) * self.size]))
            seq.names.append(self.known.setdefault(content, len(self.known)))
        return seq.names[index]

    def hits(self, seq: Seq) -> list[int]:
        """The blocks that hold the beginning of `seq`, short of its last token."""
        found: list[int] = []
        for i in range((len(seq.tokens) - 1) // self.size if self.caching else 0):
            holders = self.holders.get(self.name(seq, i))
            if not holders:
                break
            found.append(holders[0])
        return found

    def need(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def start(self, seq: Seq) -> bool:
        """Give a request what the cache holds of it, if all of its tokens would fit."""
        found = self.hits(seq)
        idle = [block for block in found if self.refs[block] == 0]
        if self.need(len(seq.tokens)) - len(found) > len(self.free) - len(idle):
            return False
        for block in found:
            self.refs[block] += 1
        self.free = [block for block in self.free if block not in idle]
        seq.blocks, seq.registered = found, len(found)
        seq.computed = len(found) * self.size
        return True

    def extend(self, seq: Seq, new: int) -> bool:
        """Blocks for `new` more tokens; those that they fill are registered at once."""
        end = seq.computed + new
        more = self.need(end) - len(seq.blocks)
        if more > len(self.free):
            return False
        for _ in range(more):
            block = self.free.pop(0)
            self.forget(block)
            self.refs[block] = 1
            seq.blocks.append(block)
        self.register(seq, end)
        return True

    def register(self, seq: Seq, end: int) -> None:
        """Make the blocks of its first `end` tokens findable, as far as these are known."""
        full = min(end, len(seq.tokens)) // self.size if self.caching else 0
        for i in range(seq.registered, full):
            name = self.name(seq, i)
            self.registered[seq.blocks[i]] = name
            self.holders.setdefault(name, []).append(seq.blocks[i])
        seq.registered = max(seq.registered, full)

    def release(self, seq: Seq) -> None:
        """Free the tail first: nameless blocks are the next to be taken, named ones the last."""
        for block in reversed(seq.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                where = 0 if self.registered[block] is None else len(self.free)
                self.free.insert(where, block)
        seq.blocks, seq.registered = [], 0

    def forget(self, block: int) -> None:
        name = self.registered[block]
        if name is not None:
            self.holders[name].remove(block)
            self.registered[block] = None


class OracleV1:
    """Two queues and a pool. `unlearn`: see `preempt`."""

    def __init__(self, config: dict[str, Any], unlearn: bool) -> None:
        caching = bool(config.get("prefix_caching"))
        self.pool = Blocks(config["gpu_blocks"], config["block_size"], caching)
        self.max_seqs: int = config["max_seqs"]
        self.max_tokens: int = config["max_batched_tokens"]
        self.by_priority = config.get("policy") == "priority"
        self.unlearn = unlearn
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.under_way: deque[list[Work]] = deque()

    @property
    def busy(self) -> bool:
        """Whether anything is left to begin or to finish."""
        return bool(self.waiting or self.running or self.under_way)

    def preempt(self, victim: Seq) -> None:
        """Take all its blocks; it waits at the front, or where its priority puts it.

        A victim that was already scheduled in this step has registered blocks that no step will
        compute. vLLM leaves them in the cache, pagedsim takes them out (`unlearn`).
        """
        if self.unlearn:
            for block in victim.blocks[victim.computed // self.pool.size : victim.registered]:
                self.pool.forget(block)
        self.pool.release(victim)
        victim.computed = victim.pending = 0
        victim.lives += 1
        self.waiting.insert(0, victim)

    def run(self) -> tuple[dict[int, int], list[Seq]]:
        """Tokens for each that runs, in order, and the requests preempted for it."""
        work: dict[int, int] = {}
        preempted: list[Seq] = []
        todo = self.running[:]
        for seq in todo:
            if seq not in self.running or sum(work.values()) == self.max_tokens:
                continue
            if seq.ends_anyway:
                continue
            new = min(seq.wanted, self.max_tokens - sum(work.values()))
            while seq in self.running and not self.pool.extend(seq, new):
                last = max(self.running, key=lambda s: s.key) if self.by_priority else None
                victim = last or self.running[-1]
                self.running.remove(victim)
                work.pop(victim.id, None)
                self.preempt(victim)
                preempted.append(victim)
            if seq in self.running:
                work[seq.id] = new
        return work, preempted

    def admit(self, work: dict[int, int]) -> list[list[int]]:
        """Start waiting requests with the rest of the budget; what the cache held of the new."""
        cached: list[list[int]] = []
        while self.waiting and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            left = self.max_tokens - sum(work.values())
            if left == 0 or not self.pool.start(seq):
                break
            if seq.computed and not seq.seen:
                cached.append([seq.id, seq.computed])
            work[seq.id] = min(seq.wanted, left)
            self.pool.extend(seq, work[seq.id])
            seq.seen = True
            self.running.append(self.waiting.pop(0))
        return cached

    def step(self) -> Step:
        """Decide one step, and begin it."""
        if self.by_priority:
            self.waiting.sort(key=lambda seq: seq.key)
        work, preempted = self.run()
        if self.by_priority:
            self.waiting.sort(key=lambda seq: seq.key)
        cached = self.admit(work) if not preempted else []
        record: Step = {
            "scheduled": [[id, new] for id, new in work.items()],
            "cached": cached,
            "preempted": sorted(seq.id for seq in preempted),
            "waiting": [seq.id for seq in self.waiting],
            "running": [seq.id for seq in self.running],
            "free": len(self.pool.free),
        }
        self.under_way.append(self.begin(work))
        return record

    def begin(self, work: dict[int, int]) -> list[Work]:
        """Count as computed what the step will compute."""
        begun: list[Work] = []
        by_id = {seq.id: seq for seq in self.running}
        for id, tokens in work.items():
            seq = by_id[id]
            seq.computed += tokens
            samples = seq.wanted == 0
            seq.pending += samples
            begun.append(Work(seq, tokens, samples, seq.lives))
        return begun

    def finish(self) -> Step:
        """Take the tokens of the oldest step under way; requests may end with them."""
        output: list[list[int]] = []
        finished: list[int] = []
        for seq, _, samples, life in self.under_way.popleft():
            if not samples:
                continue
            seq.tokens.append(7)
            output.append([seq.id, 1])
            if life == seq.lives:  # else it was preempted since, and computes this token again
                seq.pending -= 1
                self.pool.register(seq, seq.computed - self.unfinished(seq))
            if len(seq.tokens) >= seq.end:
                self.pool.release(seq)
                (self.running if seq in self.running else self.waiting).remove(seq)
                finished.append(seq.id)
        return {"output": output, "finished": finished}

    def unfinished(self, seq: Seq) -> int:
        """Tokens that steps under way compute of a request, in its present life."""
        works = (work for step in self.under_way for work in step)
        return sum(w.tokens for w in works if w.seq is seq and w.life == seq.lives)


def prompt(request: dict[str, Any]) -> list[int]:
    """A prompt's tokens; where only its length is known, no two share any."""
    runs = request.get("prompt") or [[-1 - request["id"], request["prompt_len"]]]
    tokens = [stream * 100_003 + i for stream, length in runs for i in range(length)]
    return tokens[: request["prompt_len"]]


def simulate(
    config: dict[str, Any], requests: list[dict[str, Any]], unlearn: bool = False
) -> Iterator[Step]:
    """Every scheduling call of a workload, until all its requests are done."""
    oracle = OracleV1(config, unlearn)
    coming: list[tuple[int, Seq]] = []
    for arrival, r in enumerate(requests):
        tokens = prompt(r)
        end = min(len(tokens) + r["output_len"], config["max_model_len"])
        seq = Seq(r["id"], (r.get("priority", 0), arrival), tokens, end)
        coming.append((r["arrival_step"], seq))
    coming.sort(key=lambda pair: (pair[0], pair[1].id))
    call = _ahead if config.get("async_scheduling") else _at_once
    now, ended = 0, False
    while coming or oracle.busy:
        while coming and coming[0][0] <= now:
            oracle.waiting.append(coming.pop(0)[1])
        if oracle.busy:
            step = {"step": now} | call(oracle, now, ended)
            ended = bool(step["finished"])
            yield step
        now += 1


def _at_once(oracle: OracleV1, now: int, ended: bool) -> Step:
    """A step, from its beginning to its end."""
    step = oracle.step() | oracle.finish()
    del step["output"]
    return step


def _ahead(oracle: OracleV1, now: int, ended: bool) -> Step:
    """Begin a step, then finish the one before.

    After the last requests have `ended` a step is begun that reports this to vLLM's workers.
    """
    before = len(oracle.under_way)
    step = oracle.step() if oracle.waiting or oracle.running or ended else {}
    if not before:
        return step | {"updated": None, "output": [], "finished": []}
    return step | {"updated": now - 1} | oracle.finish()
