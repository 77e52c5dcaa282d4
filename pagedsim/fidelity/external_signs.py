"""What a log says that no single server of these settings can have done."""

from __future__ import annotations

from collections.abc import Iterator

from pagedsim.fidelity.external_constants import serve_at_the_peak
from pagedsim.fidelity.external_course import Course
from pagedsim.fidelity.external_server import ExternalServer, Served

FASTER = 1.05
"""How much longer a request takes at the data sheet's peak than it was measured, to be told."""
MANY = 0.05
"""The part of the requests that must be so: one by one, chance decides who waits."""
OVER = 1.1
"""How much more memory a log must seem to use than there is."""
OTHERWISE = (
    "more than one replica may be behind this log, or another GPU, or prompts that it had cached"
)


def signs(server: ExternalServer, served: Served) -> Iterator[str]:
    """Each in a line; `served`: what the simulated server did with the log."""
    log = server.log
    latencies = serve_at_the_peak(server).latencies
    faster = latencies.e2e > FASTER * log.latencies.e2e
    if faster.mean() > MANY:
        yield (
            f"{int(faster.sum()):,} of {len(log):,} requests were answered faster than one server "
            "can at the full rates of the data sheet and with no work of the host: " + OTHERWISE
        )
    if served.preemptions:  # who is preempted has begun, and holds no memory
        return
    course = Course.of(log, log.latencies, server.scheduler)
    most = server.config["server"]["max_seqs"]
    if course.running.max() > most:
        yield (
            f"up to {int(course.running.max()):,} requests had begun and not ended at a time, and "
            f"server.max_seqs={most} lets one server run no more than that: {OTHERWISE}"
        )
    if course.kv.max() > 100 * OVER:
        yield (
            f"the requests that ran at a time took up to {course.kv.max():.0f} % of the memory for "
            f"keys and values, by their lengths: {OTHERWISE}"
        )
