"""Work in parallel, results in order: how every walk over tensors uses its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")


def default_threads() -> int:
    """Return the number of cores that this process may use, at most 16: beyond that memory is the limit."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, 16)


def run_in_order(
    tasks: Iterable[T],
    work: Callable[[T, S], R],
    fold: Callable[[T, R], None],
    *,
    threads: int,
    scratch: Callable[[], S],
) -> None:
    """Call ``fold(task, work(task, scratch))`` for every task.

    `work` runs in any of `threads` threads, each with a scratch of its own; `fold` runs in the order of the tasks, one
    at a time, in the thread that did the work, so that what it hashes and writes is still in that core's cache and
    nothing is queued. The first exception stops all threads and is raised here.
    """
    if threads <= 1:
        memory = scratch()
        for task in tasks:
            fold(task, work(task, memory))
        return

    source = enumerate(tasks)
    source_lock = threading.Lock()
    turn = threading.Condition()
    current = 0
    failures: list[BaseException] = []

    def loop() -> None:
        nonlocal current
        try:
            memory = scratch()
            while True:
                with source_lock:
                    found = None if failures else next(source, None)
                if found is None:
                    return
                index, task = found
                result = work(task, memory)
                with turn:
                    while current != index and not failures:
                        turn.wait()
                    if failures:
                        return
                fold(task, result)
                with turn:
                    current += 1
                    turn.notify_all()
        except BaseException as error:
            with turn:
                failures.append(error)
                turn.notify_all()

    workers = [threading.Thread(target=loop, daemon=True) for _ in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException as error:  # Ctrl-C arrives here, in the main thread
        with turn:
            failures.append(error)
            turn.notify_all()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    if failures:
        raise failures[0]
