"""A training process that is started early, so that it imports torch while `join` finds the run.

Both take about as long. The process then waits for its order: the trainer's settings as msgpack,
and a file descriptor of the weights' shared memory (no pickle). This module must not import
anything heavy.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
from contextlib import suppress
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgpack

from node.console.terminal import no_interrupts
from node.machine.whole_import import before_stop

Started = tuple[BaseProcess, Connection]

_spare: Started | None = None


def prepare() -> None:
    """Start the spare process for the next `take`, unless there is one."""
    global _spare
    if _spare is None:
        _spare = _start()


def take() -> Started:
    """The spare process if it is alive, else a new one."""
    global _spare
    started, _spare = _spare, None
    if started is not None and not started[0].is_alive():
        _drop(started)
        started = None
    return started or _start()


def discard() -> None:
    """End the spare process, which is not needed after all."""
    global _spare
    started, _spare = _spare, None
    if started is not None:
        started[0].kill()
        _drop(started)


def leave_none() -> None:
    """End all child processes, before this process ends.

    With its first child multiprocessing starts another one, which cleans up named semaphores and
    shared memory. We use neither, and it would outlive us by some 40 ms.
    """
    discard()
    helper: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    if helper is not None:
        with suppress(OSError):
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)


def _drop(started: Started) -> None:
    process, connection = started
    connection.close()
    process.join()
    process.close()


def _start() -> Started:
    before_stop(leave_none)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait_for_order, args=(theirs,), daemon=True)
    with no_interrupts():  # the child inherits the blocked SIGINT: Ctrl-C reaches it as well
        process.start()
    theirs.close()
    return process, ours


# The order.


def anonymous_memory(size_bytes: int) -> tuple[int, mmap.mmap]:
    """The descriptor and mapping of an unnamed file, freed when the processes end, however."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("blockswarm-weights")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size_bytes)
    return fd, mmap.mmap(fd, size_bytes)


def give_order(started: Started, order: dict[str, Any], memory_fd: int) -> None:
    """Send the process its order. Raises OSError if the process is gone."""
    process, connection = started
    connection.send_bytes(msgpack.packb(order))
    reduction.send_handle(connection, memory_fd, process.pid)


def _wait_for_order(connection: Connection) -> None:
    """Main function of the process: import, receive the order, train. Ends with the pipe."""
    threading.Thread(target=_end_with_owner, daemon=True).start()
    from node.trainer.process import trainer_main

    try:
        order = msgpack.unpackb(connection.recv_bytes(), strict_map_key=False)
        fd = reduction.recv_handle(connection)
    except (EOFError, OSError):
        return  # the parent is gone
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    trainer_main(connection, order, memory)


def _end_with_owner() -> None:
    """End with the parent, from a thread: a long import or step does not look at the pipe."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    os._exit(1)
