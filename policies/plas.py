"""Programs that were served least go first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from pagedsim.core import Admitted, Arrived, Event, Left, Request, ServerState
from pagedsim.core.errors import require_flag
from policies.mlfq import MLFQ


class PLAS(MLFQ):
    """As `mlfq`, but a request joins the level of what its session was served before.

    That is the time that its finished requests spent in the batch, all together, or with
    `critical_path` of the longest chain of them, since those that go in parallel take as long as
    one (ATLAS). A level is joined once the quanta of those before it are used up.
    """

    paper = "Luo et al., Autellix, 2025 (2502.13965): PLAS; with critical_path, ATLAS"
    needs = ("session",)

    def __init__(
        self,
        quantum: float = 0.01,
        levels: int = 16,
        starve: float = 3.0,
        displace: bool = True,
        critical_path: bool = False,
    ) -> None:
        super().__init__(quantum, levels, starve, displace)
        self.critical_path = require_flag("critical_path", critical_path)
        self._service: defaultdict[str | None, float] = defaultdict(float)
        self._began: dict[Request, float] = {}  # service of its session when it came
        self._since: dict[Request, float] = {}  # when those in the batch joined it
        self._had: defaultdict[Request, float] = defaultdict(float)  # seconds in the batch before
        self._raised: list[Request] = []  # arrivals whose session may have been served since `add`

    def entry(self, request: Request) -> int:
        left = self._service[request.session]
        for level, quantum in enumerate(self.quanta):
            if left < quantum:
                return level
            left -= quantum
        return self.levels - 1

    def stale(self, state: ServerState) -> Collection[Request]:
        raised, self._raised = self._raised, []
        return [*raised, *super().stale(state)]

    def observe(self, event: Event) -> None:
        request, now = event
        if isinstance(event, Arrived):
            self._began[request] = self._service[request.session]
        elif isinstance(event, Admitted):
            self._since[request] = now
        elif request in self._since:
            self._had[request] += now - self._since.pop(request)
        if isinstance(event, Left):
            self._end(request)
        super().observe(event)
        if isinstance(event, Arrived) and self._places[request].level:
            self._raised.append(request)

    def _end(self, request: Request) -> None:
        """Its session has had what it got."""
        began, had = self._began.pop(request), self._had.pop(request, 0.0)
        if request.session is None:
            return
        so_far = self._service[request.session]
        longest = max(so_far, began + had)
        self._service[request.session] = longest if self.critical_path else so_far + had
