"""Several schedulers whose requests go on elsewhere at random, with or without what they have.

Rounds go by; in each, every scheduler carries out a step. What comes from outside comes while a
step is under way, or between two. Each scheduler has a shadow that carries its plans out
(`shadow.py`), and what moves is copied from one shadow to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from pagedsim.core import Continuation, Request, RequestId, Scheduler, State, StepPlan
from pagedsim.core.memory.reserved import ReservedMemory
from pagedsim.core.plan import sampled_in
from tests.core.cases import Job, Server, jobs, servers, token
from tests.core.odd_policies import Counting
from tests.core.run import OVER, summary
from tests.core.shadow import Shadow

Answers = dict[RequestId, int | Continuation]

PATIENCE = 6
"""How often a journey asks for room before it does something else."""
BUSY = 100
"""Rounds in which requests move; then those that are left are served to their ends."""
LAST = 1500
"""The round in which all requests must have ended."""


@dataclass(frozen=True)
class Trip:
    """Some servers, what comes to them, and a seed for all that happens."""

    servers: tuple[Server, ...]
    jobs: tuple[Job, ...]
    tells_tokens: bool = False
    ahead: bool = False
    seed: int = 0


@st.composite
def trips(draw: st.DrawFn, ahead: bool = False, untold: bool = False) -> Trip:
    """Two or three servers of any kind, of which the first can be boarded."""
    first = draw(_kinds(("unified", "prefill_first", "one_by_one"), ("paged", "prefix")))
    kinds = [first, *draw(st.lists(_kinds(), min_size=1, max_size=2))]
    made = [draw(servers(batching, memory)) for batching, memory in kinds]
    longest = min(server.max_model_len or _capacity(server) for server in made)
    widths = draw(st.sampled_from(((1,), (1, 1, 1, 1, 2))))
    some = jobs(max(2, longest // 2), min(14, 2 + longest // 2), widths)
    return Trip(
        servers=tuple(made),
        jobs=tuple(draw(st.lists(some, min_size=1, max_size=8))),
        tells_tokens=not untold and draw(st.booleans()),
        ahead=ahead,
        seed=draw(st.integers(0, 10**6)),
    )


def _kinds(
    batchings: tuple[str, ...] = ("unified", "prefill_first", "one_by_one", "static"),
    memories: tuple[str, ...] = ("paged", "prefix", "paged", "prefix", "reserved_oracle"),
) -> st.SearchStrategy[tuple[str, str]]:
    return st.tuples(st.sampled_from(batchings), st.sampled_from(memories))


def _capacity(server: Server) -> int:
    return server.reserved_len or server.blocks * server.block_size


class Flight(NamedTuple):
    """A step under way, and what was sampled in it."""

    plan: StepPlan
    answers: Answers


@dataclass(eq=False)
class Site:
    """A scheduler, what carries its plans out, and the step that is under way."""

    scheduler: Scheduler
    shadow: Shadow
    plan: StepPlan | None = None
    flight: Flight | None = None

    def table(self, request: Request) -> list[int]:
        """Of its blocks here, or of those that are held for it."""
        if request.id in self.scheduler.requests:
            return request.tables[0]
        return self.scheduler.queues.reservations.placeholders[request.id].tables[0]


@dataclass(eq=False)
class Known:
    """What was seen of a request, and must not be taken back."""

    job: Job
    request: Request
    most: int
    """Tokens that it may say where it was so far."""
    generated: int = 0
    first_token_at: float | None = None


@dataclass(eq=False)
class Journey:
    """A request on its way. Before it has parted, copies are made in `stages`."""

    request: Request
    source: Site
    target: Site
    stages: int
    carried: int = 0
    output_len: int | None = None
    """Once it has parted."""
    asked: int = 0
    reserved_in: int = 0
    """The step of the target that came next when memory was reserved there last."""


class Travel:
    """A trip, to its end. `glides`: quiet steps are not planned one by one."""

    def __init__(self, trip: Trip, glides: bool = False) -> None:
        self.trip = trip
        self.glides = glides
        self.random = Random(trip.seed)
        self.now = 0.0
        self.round = 0
        self.known: dict[RequestId, Known] = {}
        self.journeys: list[Journey] = []
        self.stray: dict[Request, int] = {}
        """Withdrawn, and not added again; with the length of their output."""
        self.trace: list[object] = []
        self.sites: list[Site] = []
        for number, server in enumerate(trip.servers):
            scheduler = server.build(trip.seed + number, trip.ahead)
            if trip.tells_tokens:
                scheduler.expect_tokens()
            beside = self.sites[0].shadow if self.sites else None
            self.sites.append(Site(scheduler, Shadow(scheduler.memory, beside)))
        self.lines = self.sites[0].shadow.lines
        for site in self.sites:
            site.shadow.lines = self.lines

    def go(self) -> Travel:
        """Until no request is left anywhere."""
        coming = [(str(index), job) for index, job in enumerate(self.trip.jobs)]
        while coming or any(known.request.alive for known in self.known.values()):
            while coming and self.random.random() < 0.5:
                self._arrive(*coming.pop(0))
            for site in self.sites:
                if self.trip.ahead:
                    self._step_ahead(site)
                else:
                    self._step(site)
            self._audit_requests()
            self.now += 1
            self.round += 1
            assert self.round < LAST, f"still on their way: {self.journeys}, {self.sites}"
        for journey in tuple(self.journeys):
            self._give_up(journey)
        for site in self.sites:
            if site.flight is not None:
                self._tell(site, site.flight)
            self._audit_end(site)
        return self

    def _arrive(self, name: str, job: Job) -> None:
        request, site = job.request(name), self.random.choice(self.sites)
        self.known[name] = Known(job, request, job.output)
        self._bound(request, site)
        site.scheduler.add(request, self.now, job.output)
        site.shadow.add(request)

    def _bound(self, request: Request, site: Site) -> None:
        """A request is served at a site, which may bound its output."""
        known = self.known[request.id]
        room = max(site.scheduler.max_model_len - known.job.prompt, 1)
        known.most = min(known.most, room)

    # -- steps -----------------------------------------------------------------------------------

    def _step(self, site: Site) -> None:
        """From the middle of one step to the middle of the next."""
        scheduler, plan = site.scheduler, site.plan
        self._happen(site)
        between = self.random.random() < 0.5
        if plan is not None:
            if self.glides and not between and scheduler.uneventful(plan):
                self._sample(plan)
                if scheduler.fast_forward(plan, self.now):
                    self._carry_out(site, plan)
                    return
            else:
                answers = self._sample(plan)
                told = answers if self.trip.tells_tokens else None
                scheduler.commit(plan, self.now, told)
            site.plan = None
        if between:
            self._happen(site)
        if scheduler.unfinished or scheduler.migration.held:
            site.plan = scheduler.plan(self.now)
            self._carry_out(site, site.plan)

    def _step_ahead(self, site: Site) -> None:
        """The same, with a step planned while the one before it is under way."""
        scheduler = site.scheduler
        if not (site.flight or scheduler.unfinished or scheduler.migration.held):
            self._happen(site)
            return
        current, following = site.flight or self._launch(site), None
        if scheduler.runnable and not scheduler.looks_back:
            following = self._launch(site)
        self._happen(site)
        self._tell(site, current)
        self._happen(site)
        if following is not None and following.plan.empty:
            self._tell(site, following)
            following = None
        site.flight = following

    def _launch(self, site: Site) -> Flight:
        plan = site.scheduler.plan(self.now)
        self._carry_out(site, plan)
        self._happen(site)
        flight = Flight(plan, self._sample(plan))
        site.scheduler.dispatch(plan)
        self._audit(site)
        return flight

    def _tell(self, site: Site, flight: Flight) -> None:
        told = flight.answers if self.trip.tells_tokens else None
        site.scheduler.complete(flight.plan, self.now, told)
        self._audit(site)

    def _carry_out(self, site: Site, plan: StepPlan) -> None:
        self._audit(site)
        self.trace.append(summary(site.scheduler, plan))
        site.shadow.execute(plan)
        queues = site.scheduler.queues
        site.shadow.scrub(queues.holders, queues.copies)

    def _sample(self, plan: StepPlan) -> Answers:
        """What the device samples, also for requests that are gone by now."""
        answers: Answers = {}
        there = sampled_in(plan)
        for request in (*plan.decodes, *(c.request for c in plan.chunks if c.samples)):
            position, stream = request.num_tokens, self.known[request.id].job.stream
            says = [token(stream or 0, position)] * request.num_seqs
            answers[request.id] = Continuation(says) if request.num_seqs > 1 else says[0]
            if request in there:
                own = [(request.id, i, position) for i in range(request.num_seqs)]
                tokens = says if self.trip.tells_tokens else own
                self.sites[0].shadow.sampled(request, tokens, range(request.num_seqs))
        return answers

    # -- what comes from outside -----------------------------------------------------------------

    def _happen(self, stepping: Site) -> None:
        """At any site: what happens elsewhere comes while a step is under way there."""
        site = self.random.choice((stepping, *self.sites))
        for journey in tuple(self.journeys):
            if self.random.random() < 0.5:
                self._go_on(journey)
        for request, output_len in tuple(self.stray.items()):
            outgrown = request.generated and site.scheduler.infeasible(request)
            if self.random.random() < 0.3 and not outgrown:  # or else it is rejected
                self._add_again(request, site, output_len)
        if self.round < BUSY:
            chance = self.random.random()
            if chance < 0.3:
                self._set_out(site)
            elif chance < 0.35:
                self._withdraw(site)
            elif chance < 0.38:
                self._abort(site)
        self._look_up(site)
        self._audit(site)

    def _look_up(self, site: Site) -> None:
        """What a cache has of a request, wherever that is, is what the request begins with."""
        memory, size = site.scheduler.memory, site.shadow.size
        alive = [one.request for one in self.known.values() if one.request.alive]
        if not alive:
            return
        request = self.random.choice(alive)
        hit = memory.lookup(request)
        for index, block in enumerate(hit):
            line = self.lines[request.id][0][index * size : (index + 1) * size]
            assert site.shadow.gpu[block] == line, f"{request!r} finds block {block} of another"

    def _set_out(self, site: Site) -> None:
        """Migrate a decoding request elsewhere, or away and back."""
        target, stages = self.random.choice(self.sites), self.random.choice((0, 0, 1, 2, 3))
        under_way = {journey.request for journey in self.journeys}
        some = [
            one
            for one in site.scheduler.running
            if one not in under_way and one.params.num_seqs == 1 and _could_part(site, one)
        ]
        if (
            not some
            or site.scheduler.migration.detach_error
            or target.scheduler.migration.attach_error
        ):
            return
        request = self.random.choice(some)
        if target is not site and target.scheduler.infeasible(request):
            return
        self.journeys.append(Journey(request, site, target, 0 if target is site else stages))

    def _go_on(self, journey: Journey) -> None:
        request, source = journey.request, journey.source
        if journey.output_len is not None:
            self._arrive_there(journey)
        elif not self._may_go_on(journey):
            self._give_up(journey)
        elif journey.stages:
            if self._reserve(journey):
                if self._copy(journey):
                    journey.stages -= 1
                return
            journey.asked += 1
            if journey.asked > PATIENCE:
                self._give_up(journey)
        elif _could_part(source, request):
            journey.output_len = source.scheduler.migration.detach(request, self.now)
            journey.asked = 0
            self._trim(request)

    def _may_go_on(self, journey: Journey) -> bool:
        """Whether a request not detached yet still decodes, and can be served at its target."""
        request, source, target = journey.request, journey.source, journey.target
        if request.id not in source.scheduler.requests or not request.decoding:
            return False
        return target is source or not target.scheduler.infeasible(request)

    def _arrive_there(self, journey: Journey) -> None:
        """A detached request gets room, its keys and values, and its place."""
        request, source, target = journey.request, journey.source, journey.target
        journey.asked += 1
        if journey.asked > PATIENCE:
            self._turn_back(journey)
            return
        if target is not source:
            if target.scheduler.infeasible(request):
                self._turn_back(journey)
                return
            if not self._reserve(journey):
                return
            if not self._copy(journey):
                return
        if self._board(journey, target) and target is not source:
            source.scheduler.migration.release_reservation(request)

    def _board(self, journey: Journey, site: Site) -> bool:
        request = journey.request
        if not site.scheduler.migration.attach(request, self.now, journey.output_len):
            return False
        self._bound(request, site)
        self.journeys.remove(journey)
        self._audit(site)
        return True

    def _turn_back(self, journey: Journey) -> None:
        """There is no room for it; it goes back, or is added somewhere without what it has."""
        request, source, target = journey.request, journey.source, journey.target
        if target is not source and request in target.scheduler.migration.held:
            target.scheduler.migration.release_reservation(request)
        if not source.scheduler.migration.attach_error and self.random.random() < 0.5:
            self._board(journey, source)
            return
        self._give_up(journey)
        assert journey.output_len is not None
        self.stray[request] = journey.output_len

    def _give_up(self, journey: Journey) -> None:
        """No blocks are held for it any more."""
        self.journeys.remove(journey)
        for site in self.sites:
            if journey.request in site.scheduler.migration.held:
                site.scheduler.migration.release_reservation(journey.request)

    def _reserve(self, journey: Journey) -> bool:
        memory, scheduler = journey.target.scheduler.memory, journey.target.scheduler
        free = memory.free
        if not scheduler.migration.reserve(journey.request, self.now):
            assert memory.free == free
            return False
        if memory.free != free:
            journey.reserved_in = scheduler.queues.step
        return True

    def _copy(self, journey: Journey) -> bool:
        """Bring what is lacking to the target's shadow, once what was there is written down."""
        request, source, target = journey.request, journey.source, journey.target
        placeholder = target.scheduler.queues.reservations.placeholders[request.id]
        begin, end = max(journey.carried, placeholder.computed), request.computed
        parcel = target.scheduler.migration.kv_transfer(request, journey.carried)
        assert parcel.tokens == max(end - begin, 0)
        assert (parcel.blocks > 0) == (parcel.tokens > 0)
        there, here = source.table(request), target.table(request)
        for position in range(begin, end):
            block, slot = divmod(position, source.shadow.size)
            value = source.shadow.gpu[there[block]][slot]
            block, slot = divmod(position, target.shadow.size)
            target.shadow.gpu[here[block]][slot] = value
        journey.carried = max(journey.carried, end)
        return True

    def _withdraw(self, site: Site) -> None:
        if some := list(site.scheduler.requests.values()):
            request = self.random.choice(some)
            self.stray[request] = site.scheduler.withdraw(request, self.now)
            self._trim(request)

    def _add_again(self, request: Request, site: Site, output_len: int) -> None:
        if request in site.scheduler.migration.held:  # its journey is not called off yet
            site.scheduler.migration.release_reservation(request)
        del self.stray[request]
        self._bound(request, site)
        site.scheduler.add(request, self.now, output_len)

    def _abort(self, site: Site) -> None:
        scheduler = site.scheduler
        away = [request for request in scheduler.migration.held if request.state is State.AWAY]
        some = [*scheduler.requests.values(), *away]
        if some:
            request = self.random.choice(some)
            assert scheduler.abort(request.id, self.now) is request
            self.stray.pop(request, None)
            self._trim(request)
            for journey in tuple(self.journeys):
                if journey.request is request:
                    self._give_up(journey)

    def _trim(self, request: Request) -> None:
        """Tokens that it was not told of are lost."""
        lines = self.lines[request.id][: request.num_seqs if request.generated else 1]
        self.lines[request.id] = [line[: request.num_tokens] for line in lines]

    # -- what must hold --------------------------------------------------------------------------

    def _audit(self, site: Site) -> None:
        scheduler, memory = site.scheduler, site.scheduler.memory
        scheduler.check()
        holders = scheduler.queues.holders
        if not isinstance(memory, ReservedMemory):
            used = set(chain.from_iterable(table for one in holders for table in one.tables))
            assert len(used) == memory.used
        usage = memory.usage(holders)
        assert sum(usage) == memory.total * memory.block_size, usage
        assert min(usage) >= 0, usage

    def _audit_requests(self) -> None:
        for known in self.known.values():
            request = known.request
            assert request.generated >= known.generated or self.trip.ahead, "tokens are lost"
            known.generated = request.generated
            if known.first_token_at is not None:
                assert request.first_token_at == known.first_token_at
            known.first_token_at = request.first_token_at
            assert (request.first_token_at is None) == (not request.generated) or self.trip.ahead
            where = [site for site in self.sites if request.id in site.scheduler.requests]
            assert len(where) == (request.alive and request.state is not State.AWAY), request
            if request.state is State.FINISHED:
                assert request.generated == known.most or known.job.width > 1, request
                assert request.generated <= known.most
            if self.trip.tells_tokens and request.outputs:
                assert len(request.outputs[0]) <= request.generated

    def _audit_end(self, site: Site) -> None:
        scheduler, memory = site.scheduler, site.scheduler.memory
        assert all(known.request.state in OVER for known in self.known.values())
        assert not scheduler.migration.held
        assert not scheduler.migration.deferred
        assert not scheduler.queues.copies
        assert memory.free == memory.total
        assert memory.cpu_free == memory.cpu_total
        if isinstance(scheduler.policy, Counting):
            assert scheduler.policy.arrived == scheduler.policy.left


class OneWay(Travel):
    """Requests that decode at the last site migrate to the first, and none gives up."""

    def _happen(self, site: Site) -> None:
        target, source = self.sites[0], self.sites[-1]
        if site is source and not source.scheduler.migration.detach_error:
            for request in tuple(source.scheduler.running):
                alone = request.params.num_seqs == 1 and _could_part(source, request)
                if alone and not target.scheduler.infeasible(request):
                    journey = Journey(request, source, target, stages=0)
                    self.journeys.append(journey)
                    self._go_on(journey)
        if site is target:
            for journey in tuple(self.journeys):
                journey.asked = 0
                self._go_on(journey)
        self._audit(site)


def _could_part(site: Site, request: Request) -> bool:
    return request.decoding and request.generated > site.scheduler.queues.tokens_in_flight(request)
