"""Numbers between the processes of one host: all arrive, in turn, whoever is late; and who never comes is named."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.processes import run
from lightning_moe.dispatch import mailbox
from lightning_moe.dispatch.mailbox import WORDS, Mailbox
from lightning_moe.dispatch.transport import CollectiveTransport
from lightning_moe.ops.routing import chunk_slices, count_needs

SHAPES = [(1,), (2, 3), (4, 2, 5), (4096,), (WORDS,)]
MOST = 2**31 - 1


def numbers(rank: int, turn: int) -> torch.Tensor:
    """Zeros, small ones, and the largest that there are."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    drawn = torch.randint(-2, 5, SHAPES[turn % len(SHAPES)], dtype=torch.int32, generator=generator)
    return torch.where(drawn < 0, MOST, drawn)


def tell(teller, numbers: torch.Tensor):
    blank = teller.blank(numbers.shape, numbers.device)
    blank.words.copy_(numbers.long() + blank.mark)
    return teller.tell(blank)


def all_gather(box: Mailbox, numbers: torch.Tensor) -> list[list[int]]:
    return tell(box, numbers).wait()


def gather_many(num_turns: int) -> int:
    """Ranks are late in turn, or not at all, and now and then one runs ahead as far as it can."""
    rank, size = dist.get_rank(), dist.get_world_size()
    box, rng = Mailbox(dist.group.WORLD, timedelta(seconds=30)), random.Random(rank)
    for turn in range(num_turns):
        if rng.random() < 0.2:
            time.sleep(0.01 * rng.random())
        heard = all_gather(box, numbers(rank, turn))
        assert heard == [numbers(peer, turn).flatten().tolist() for peer in range(size)], turn
    return num_turns


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_turn_brings_every_ranks_numbers(num_ranks):
    assert run(gather_many, num_ranks, 140) == [140] * num_ranks


def tell_the_second_time() -> list[list[list[int]]]:
    """Rank 0 is interrupted once, when its numbers may have been seen: it does not write others in their place."""
    box = Mailbox(dist.group.WORLD, timedelta(seconds=30))
    if dist.get_rank() == 0:
        blank = box.blank((1,), torch.device("cpu"))
        blank.words.copy_(blank.mark + torch.tensor([111]))
    else:
        letter = tell(box, torch.tensor([5]))
    dist.barrier()
    if dist.get_rank() == 1:
        return [letter.wait(), all_gather(box, torch.tensor([6]))]
    return [all_gather(box, torch.tensor([222]))]


def test_what_may_have_been_read_is_not_written_again():
    assert run(tell_the_second_time, 2) == [[[[222], [6]]], [[[111], [5]], [[222], [6]]]]


def count_on_a_gpu(may_write: bool) -> bool:
    """A kernel's counts of many turns; whether they went through memory of the device."""
    box, device = Mailbox(dist.group.WORLD, timedelta(seconds=30)), torch.device("cuda", 0)
    box._registered = None if may_write else False
    for turn in range(40):
        ids_TK, expected = torch.randint(6, (50 * turn, 2), generator=torch.Generator().manual_seed(turn)), []
        for chunk in chunk_slices(len(ids_TK), 3):
            ranks = ids_TK[chunk] // 2
            expected += [(ranks == rank).any(1).sum().item() for rank in range(3)]
            expected += [(ranks == rank).sum().item() for rank in range(3)]
        blank = box.blank((3, 2, 3), device)
        count_needs(ids_TK.to(device), 6, *blank)
        assert box.tell(blank).wait() == [expected], turn
    return blank.words.is_cuda


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")
@pytest.mark.parametrize("may_write", [True, False])
def test_a_gpu_writes_its_counts_itself_or_they_are_copied(may_write):
    assert run(count_on_a_gpu, 1, may_write, device="cuda") == [not may_write]


def two_groups() -> list[list[list[int]]]:
    """Mailboxes of several groups do not meet; the two of one rank are used in turn."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, everyone = pairs[dist.get_rank() // 2], dist.group.WORLD
    boxes = [Mailbox(group, timedelta(seconds=30)) for group in (pair, everyone)]
    return [all_gather(box, torch.tensor([dist.get_rank()])) for box in boxes * 3]


def test_each_group_has_its_own():
    all_of_them = [[0], [1], [2], [3]]
    assert run(two_groups, 4) == [[pair, all_of_them] * 3 for pair in ([[0], [1]], [[0], [1]], [[2], [3]], [[2], [3]])]


def stay_away() -> str:
    box = Mailbox(dist.group.WORLD, timedelta(seconds=0.5))
    all_gather(box, torch.tensor([7]))
    if dist.get_rank() == 1:
        time.sleep(2)
        return "away"
    try:
        all_gather(box, torch.tensor([7]))
    except TimeoutError as error:
        return str(error)
    return "heard"


def test_who_does_not_tell_is_named():
    """Though what it told a turn ago is still there."""
    first, second, third = run(stay_away, 3)
    assert second == "away"
    assert "Ranks [1] of" in first
    assert first == third


def end_early(how: str) -> str:
    """Rank 1 ends without a word, after a turn or before the first one; what others told meanwhile is not lost."""
    boxes = [Mailbox(dist.group.WORLD, timedelta(seconds=60)) for _ in range(2)]
    assert all_gather(boxes[0], torch.tensor([7])) == [[7]] * 3
    letter = tell(boxes[1], torch.tensor([5]))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGTERM)
        time.sleep(60)
    begin = time.monotonic()
    time.sleep(0.5)
    assert letter.wait() == [[5]] * 3  # rank 1 had told that
    try:
        all_gather(boxes[0], torch.tensor([8]))
    except dist.DistNetworkError as error:
        return f"{time.monotonic() - begin < 20} {error}"
    return "heard"


@pytest.mark.parametrize("how", ["killed", "terminated"])
def test_who_ended_is_named_long_before_the_timeout(how):
    first, _, third = run(end_early, 3, how, killed=(1,))
    assert first == third == "True Ranks [1] of the expert-parallel group have ended without telling their counts."


def be_slow(turns: int) -> list[list[list[int]]]:
    """Each rank's numbers are there long after it told them, as those of a device that is behind; all look meanwhile."""
    box, heard = Mailbox(dist.group.WORLD, timedelta(seconds=60)), []
    shown, box._mine = box._mine, tuple(torch.zeros_like(words) for words in box._mine)
    for turn in range(1, turns + 1):
        letter = tell(box, torch.tensor([dist.get_rank()]))
        late = threading.Timer(0.5 + 0.3 * dist.get_rank(), shown[turn % 2].copy_, [box._mine[turn % 2]])
        late.start()
        heard.append(letter.wait())
        late.join()
    return heard


def test_nobody_takes_itself_or_a_slow_one_for_gone():
    assert run(be_slow, 3, 3) == [[[[0], [1], [2]]] * 3] * 3


def come_late() -> list[str]:
    """Rank 1 sleeps over rank 0's patience; then both go on."""
    box = Mailbox(dist.group.WORLD, timedelta(seconds=0.3 if dist.get_rank() == 0 else 5))
    all_gather(box, torch.tensor([1]))
    said = []
    for turn in range(2):
        if dist.get_rank() == 1 and turn == 0:
            time.sleep(1)
        try:
            said.append(str(all_gather(box, torch.tensor([turn]))))
        except (TimeoutError, dist.DistNetworkError) as error:  # at the second turn rank 0 may have ended
            said.append(str(error))
    return said


def test_after_a_timeout_numbers_of_different_calls_are_not_put_together():
    first, second = run(come_late, 2)
    assert "Ranks [1] of" in first[0]
    assert "lost step" in first[1]
    assert second[0] == "[[0], [0]]"  # rank 0 had told its number before it lost patience
    assert "Ranks [0] of" in second[1]


def go_ahead() -> str:
    """Rank 0 writes as if it were a turn further."""
    box = Mailbox(dist.group.WORLD, timedelta(seconds=20))
    if dist.get_rank() == 0:
        box._turn = 2
    begin = time.monotonic()
    try:
        all_gather(box, torch.tensor([1]))
    except (TimeoutError, dist.DistNetworkError) as error:
        return f"{time.monotonic() - begin < 10 or dist.get_rank() == 0} {error}"
    return "heard"


def test_a_rank_that_is_behind_is_told_so_at_once():
    _, second = run(go_ahead, 2)
    assert second.startswith("True Ranks [0] of the expert-parallel group went on without this one")


def tell_too_much() -> str:
    with pytest.raises(ValueError, match="use a smaller") as error:
        Mailbox(dist.group.WORLD, timedelta(seconds=5)).blank((2, 1 + WORDS // 2), torch.device("cpu"))
    return str(error.value)


def test_more_numbers_than_a_message_holds_are_refused():
    assert run(tell_too_much, 1) == [
        f"[2, {1 + WORDS // 2}] counts are more than the {WORDS} that ranks can tell each other"
        " at once: use a smaller `num_chunks`."
    ]


def lock_nothing(self, file, rank: int) -> None:
    if rank == dist.get_world_size() - 1:
        raise OSError("No locks available")


def open_apart(whose_memory: str) -> str:
    """As if the last rank were on another host, or there were no room for the memory."""
    if whose_memory == "nobody's":
        mailbox._make = lambda num_bytes: None
    elif whose_memory == "without locks":
        mailbox.Presence.__init__ = lock_nothing
    elif dist.get_rank() == dist.get_world_size() - 1:
        Path.exists = lambda path: False
    try:
        Mailbox(dist.group.WORLD, timedelta(seconds=5))
    except OSError as error:
        return str(error)
    return "opened"


@pytest.mark.parametrize(
    ("whose_memory", "ranks"), [("the others'", "[2]"), ("without locks", "[2]"), ("nobody's", "[0, 1, 2]")]
)
def test_all_ranks_hear_that_one_cannot_share_memory(whose_memory, ranks):
    expected = f"ranks {ranks} do not share memory with rank 0"
    assert run(open_apart, 3, whose_memory) == [expected] * 3


def files_left() -> bool:
    paths = []
    make = mailbox._make
    mailbox._make = lambda num_bytes: paths.append(make(num_bytes)) or paths[-1]
    box = Mailbox(dist.group.WORLD, timedelta(seconds=30))
    assert len(paths) == (dist.get_rank() == 0)
    all_gather(box, torch.tensor([1]))
    return any(Path(path).exists() for path in paths)


def test_no_file_is_left():
    assert run(files_left, 2) == [False, False]


def tell_by_collective() -> list:
    teller = CollectiveTransport(dist.group.WORLD).teller
    return tell(teller, torch.arange(6, dtype=torch.int32).view(1, 2, 3) + 10 * dist.get_rank()).wait()


def test_a_collective_tells_the_same():
    expected = [[10 * r + i for i in range(6)] for r in range(3)]
    assert run(tell_by_collective, 3) == [expected] * 3


def test_where_there_is_no_room_no_file_is_made(monkeypatch, tmp_path):
    """Not even one that grows as it is written to, which would end the process then."""

    def full(*_):
        raise OSError(28, "No space left on device")

    made = []
    make = mailbox.tempfile.mkstemp
    monkeypatch.setattr(mailbox.tempfile, "mkstemp", lambda dir: made.append(make(dir=tmp_path)) or made[-1])
    path = mailbox._make(100_000)
    assert os.stat(path).st_blocks * 512 >= 100_000
    monkeypatch.setattr(mailbox.os, "posix_fallocate", full)
    assert mailbox._make(100_000) is None
    assert [Path(name).exists() for _, name in made] == [True, False]
