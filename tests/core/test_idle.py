"""Free blocks of a cache: who came first goes first, and of those who came together the last."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pagedsim.core.memory.eviction import Idle

TOTAL = 12


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "take_out"]), st.randoms()), max_size=30))
def test_it_is_a_queue_from_which_any_block_may_be_taken(moves: list[tuple[str, Random]]) -> None:
    idle, queue, held = Idle(TOTAL), list[int](), list(range(TOTAL))
    for move, random in moves:
        some = random.sample(range(TOTAL), random.randrange(TOTAL + 1))
        if move == "add" and (bundle := [block for block in some if block in held]):
            idle.add(list(bundle))
            queue += reversed(bundle)
            held = [block for block in held if block not in bundle]
        elif move == "pop":
            gone, queue = queue[: len(some)], queue[len(some) :]
            assert idle.pop(len(some)) == gone
            held += gone
        elif move == "take_out":
            assert idle.among(some) == sum(block in queue for block in some)
            assert idle.take_out(some) == [block for block in some if block not in queue]
            held += [block for block in some if block in queue]
            queue = [block for block in queue if block not in some]
        assert list(idle) == queue
        assert idle.count == len(queue)
        assert [block in idle for block in range(TOTAL)] == [
            block in queue for block in range(TOTAL)
        ]


def test_nothing_is_left_of_bundles_that_are_found_again() -> None:
    idle = Idle(TOTAL)
    for _ in range(100):
        idle.add([3, 4, 5])
        assert idle.take_out([3, 4, 5]) == []
    assert not idle._bundles
