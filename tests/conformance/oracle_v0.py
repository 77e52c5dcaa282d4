"""vLLM 0.6.6's scheduler, once more: plainly, from its rules alone, to be the judge of ours.

It shares no line and no idea with pagedsim.core: blocks are counted, not named, and every step
looks at everything. That it is right is shown by the recorded workloads, which it reproduces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Step: TypeAlias = dict[str, Any]


@dataclass
class Seq:
    """A request: how long it is by now, and what it holds."""

    id: int
    key: tuple[int, int]  # (priority, arrival): smaller goes first
    length: int  # prompt and generated tokens
    left: int  # tokens still to generate
    blocks: int = 0


class OracleV0:
    """Three queues and two counters."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.block_size: int = config["block_size"]
        self.total: int = config["gpu_blocks"]
        self.free = self.total
        self.cpu_free: int = config.get("cpu_blocks") or 0
        self.watermark = int(0.01 * self.total)
        self.max_seqs: int = config["max_seqs"]
        self.max_tokens: int = config["max_batched_tokens"]
        self.max_model_len: int = config["max_model_len"]
        self.by_priority = config.get("policy") == "priority"
        self.swaps = config.get("preemption") == "swap"
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.swapped: list[Seq] = []

    def need(self, seq: Seq) -> int:
        """The blocks that all tokens of `seq` fill."""
        return -(-seq.length // self.block_size)

    def fits(self, seq: Seq) -> bool:
        return self.free - self.need(seq) >= self.watermark

    def can_start(self, seq: Seq, tokens: int) -> bool:
        """Whether blocks, sequences and tokens all allow it, `tokens` being prefilled already."""
        room = len(self.running) < self.max_seqs and tokens + seq.length <= self.max_tokens
        return room and self.fits(seq)

    def take(self, seq: Seq, blocks: int) -> None:
        seq.blocks += blocks
        self.free -= blocks

    def give(self, seq: Seq) -> None:
        self.free += seq.blocks
        seq.blocks = 0

    def prefill(self) -> tuple[list[Seq], list[Seq]]:
        """Start waiting requests, first come first served; also those that never can."""
        started: list[Seq] = []
        ignored: list[Seq] = []
        while self.waiting and not self.swapped:
            seq = self.waiting[0]
            too_long = seq.length > min(self.max_model_len, self.max_tokens)
            if too_long or self.total - self.need(seq) < self.watermark:
                ignored.append(self.waiting.pop(0))
            elif self.can_start(seq, sum(s.length for s in started)):
                self.take(seq, self.need(seq))
                started.append(self.waiting.pop(0))
                self.running.append(seq)
            else:
                break
        return started, ignored

    def displace(self) -> None:
        """Push the worst out of running until the first that waits could start."""
        self.running.sort(key=lambda seq: seq.key)
        if not self.waiting:
            return
        first = self.waiting[0]
        while self.running and self.running[-1].key > first.key and not self.can_start(first, 0):
            victim = self.running.pop()
            self.give(victim)
            self.waiting.append(victim)
        self.waiting.sort(key=lambda seq: seq.key)

    def decode(self) -> tuple[list[Seq], list[Seq], int]:
        """One token for each that runs, in order; the preempted; the blocks swapped out."""
        decoded: list[Seq] = []
        preempted: list[Seq] = []
        swapped_out = 0
        while self.running:
            seq = self.running.pop(0)
            # Conservative: a block must be free even where the last one has room.
            while self.free < 1:
                victim = self.running.pop() if self.running else seq
                preempted.append(victim)
                swapped_out += self.preempt(victim)
                if victim is seq:
                    break
            else:
                self.take(seq, self.need(seq) - seq.blocks)
                decoded.append(seq)
        self.running = decoded[:]
        return decoded, preempted, swapped_out

    def preempt(self, victim: Seq) -> int:
        """Take all its blocks; how many of them went to the CPU."""
        blocks = victim.blocks
        self.give(victim)
        if not self.swaps:
            self.waiting.insert(0, victim)
            return 0
        self.cpu_free -= blocks
        victim.blocks = -blocks  # held on the CPU
        self.swapped.append(victim)
        return blocks

    def swap_in(self) -> tuple[list[Seq], int]:
        """Bring back from the front of swapped what fits with its next token."""
        back: list[Seq] = []
        moved = 0
        while self.swapped and self.fits(self.swapped[0]) and len(self.running) < self.max_seqs:
            seq = self.swapped.pop(0)
            moved -= seq.blocks
            self.cpu_free -= seq.blocks
            seq.blocks = 0
            self.take(seq, self.need(seq))
            back.append(seq)
            self.running.append(seq)
        return back, moved

    def step(self) -> Step:
        """Decide one step, then generate its tokens."""
        decoded: list[Seq] = []
        preempted: list[Seq] = []
        swapped_in = swapped_out = 0
        started, ignored = self.prefill()
        if not started:
            if self.by_priority:
                self.displace()
            decoded, preempted, swapped_out = self.decode()
            if not preempted:
                back, swapped_in = self.swap_in()
                decoded += back
        record: Step = {
            "prefill": [[seq.id, seq.length] for seq in started],
            "decode": [seq.id for seq in decoded],
            "swap_in": swapped_in,
            "swap_out": swapped_out,
            "preempted": len(preempted),
            "ignored": [seq.id for seq in ignored],
            "waiting": [seq.id for seq in self.waiting],
            "running": [seq.id for seq in self.running],
            "swapped": [seq.id for seq in self.swapped],
            "free_gpu": self.free,
            "free_cpu": self.cpu_free,
        }
        return record | {"finished": self.generate(started + decoded)}

    def generate(self, seqs: list[Seq]) -> list[int]:
        """A token for each; the ids of those that end with it."""
        finished: list[int] = []
        for seq in seqs:
            seq.length += 1
            seq.left -= 1
            if seq.left == 0 or seq.length >= self.max_model_len:
                self.give(seq)
                self.running.remove(seq)
                finished.append(seq.id)
        return finished


def simulate(config: dict[str, Any], requests: list[dict[str, Any]]) -> Iterator[Step]:
    """Every scheduling call of a workload, until all its requests are done."""
    oracle = OracleV0(config)
    coming: list[tuple[int, Seq]] = []
    for arrival, r in enumerate(requests):
        seq = Seq(r["id"], (r.get("priority", 0), arrival), r["prompt_len"], r["output_len"])
        coming.append((r["arrival_step"], seq))
    coming.sort(key=lambda pair: (pair[0], pair[1].id))
    now = 0
    while coming or oracle.waiting or oracle.running or oracle.swapped:
        while coming and coming[0][0] <= now:
            oracle.waiting.append(coming.pop(0)[1])
        if oracle.waiting or oracle.running or oracle.swapped:
            yield {"step": now} | oracle.step()
        now += 1
