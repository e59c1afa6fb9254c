"""Jobs of several callers in one batch, and how many may wait."""

import asyncio
import time

import pytest

from sd_tf.runtime.call import Call
from sd_tf.serving.ray_app.batching import Batcher, BusyError, Events, Job, Together


def job(scheduler="a", index=0):
    call = Call("prompt", seed=0, scheduler=scheduler)
    return Job(index, call, Together("digest", call.alike(), 10), Events())


def test_a_complete_batch_does_not_wait():
    async def run():
        batcher = Batcher(size=2, wait=60, limit=10)
        jobs = [job(), job("b"), job(), job()]
        await batcher.put(jobs)
        return jobs, await batcher.take(), batcher

    jobs, batch, batcher = asyncio.run(run())
    assert batch == [jobs[0], jobs[2]] and len(batcher) == 2


def test_an_incomplete_batch_waits_for_more():
    async def run():
        batcher = Batcher(size=3, wait=0.2, limit=10)
        first, second = job(), job()
        await batcher.put([first])
        start = time.monotonic()
        taking = asyncio.create_task(batcher.take())
        await asyncio.sleep(0.05)
        await batcher.put([second])
        batch = await taking
        return [first, second], batch, time.monotonic() - start

    jobs, batch, taken = asyncio.run(run())
    assert batch == jobs and 0.15 < taken < 1.0


def test_the_oldest_comes_first_and_settings_stay_apart():
    async def run():
        batcher = Batcher(size=2, wait=0, limit=10)
        jobs = [job("b"), job("a"), job("a"), job("b"), job("b")]
        await batcher.put(jobs)
        return jobs, [await batcher.take() for _ in range(3)]

    jobs, batches = asyncio.run(run())
    assert batches == [[jobs[0], jobs[3]], [jobs[1], jobs[2]], [jobs[4]]]


def test_complete_batches_go_ahead_of_one_that_waits():
    async def run():
        batcher = Batcher(size=2, wait=0.2, limit=10)
        jobs = [job("a"), job("b"), job("b"), job("b"), job("b")]
        await batcher.put(jobs)
        start = time.monotonic()
        batches = [await batcher.take() for _ in range(3)]
        return jobs, batches, time.monotonic() - start

    jobs, batches, taken = asyncio.run(run())
    assert batches == [jobs[1:3], jobs[3:], jobs[:1]] and 0.15 < taken < 1.0


def test_complete_batches_do_not_keep_the_oldest_waiting():
    async def run():
        batcher = Batcher(size=2, wait=0, limit=10)
        jobs = [job("a"), job("b"), job("b")]
        await batcher.put(jobs)
        return jobs, await batcher.take()

    jobs, batch = asyncio.run(run())
    assert batch == jobs[:1]


def test_all_or_none_are_put():
    async def run():
        batcher = Batcher(size=2, wait=0, limit=3)
        await batcher.put([job(), job()])
        with pytest.raises(BusyError, match="2 pictures are waiting, at most 3 may"):
            await batcher.put([job(), job()])
        return len(batcher)

    assert asyncio.run(run()) == 2


def test_who_left_is_not_drawn():
    async def run():
        batcher = Batcher(size=2, wait=0, limit=3)
        jobs = [job(), job(), job()]
        await batcher.put(jobs)
        batcher.drop(jobs[:2])
        batch = await batcher.take()
        return jobs, batch

    jobs, batch = asyncio.run(run())
    assert batch == jobs[2:] and [one.wanted for one in jobs] == [False, False, True]


def test_two_lanes_share_the_queue():
    async def run():
        batcher = Batcher(size=2, wait=0.05, limit=10)
        lanes = [asyncio.create_task(batcher.take()) for _ in range(2)]
        jobs = [job(), job(), job()]
        await batcher.put(jobs)
        return jobs, await asyncio.gather(*lanes)

    jobs, batches = asyncio.run(run())
    assert sorted(len(batch) for batch in batches) == [1, 2]
    assert {id(one) for batch in batches for one in batch} == {id(one) for one in jobs}


def test_previews_are_spread_over_the_way():
    one = job()
    one.previews = 3
    assert one.preview_steps(20) == {5, 10, 15}
    assert one.preview_steps(2) == {1}
    assert one.preview_steps(1) == set()
