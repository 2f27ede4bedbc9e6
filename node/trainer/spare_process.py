"""A process that will train: started before anybody knows what, so that its imports are done then.

Importing torch takes as long as finding the run does, and the two do not need each other: `join`
starts the process first. It waits for its order, a trainer's settings and the shared memory of the
weights. Imports nothing heavy here; the order is msgpack and a file descriptor, no pickle.
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
    """Start a spare process, for the next `take`."""
    global _spare
    if _spare is None:
        _spare = _start()


def take() -> Started:
    """The spare process, or a new one."""
    global _spare
    started, _spare = _spare, None
    if started is not None and not started[0].is_alive():
        _drop(started)
        started = None
    return started or _start()


def discard() -> None:
    """No process is needed after all."""
    global _spare
    started, _spare = _spare, None
    if started is not None:
        started[0].kill()
        _drop(started)


def leave_none() -> None:
    """Before this process ends: no child of ours may outlive it.

    Beside its first child multiprocessing starts one more, which tidies up named semaphores and
    shared memory. We have none, and it would notice our end some 40 ms after it.
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
    with no_interrupts():  # Ctrl-C reaches a child of the terminal, too; this one does not hear it
        process.start()
    theirs.close()
    return process, ours


# The order.


def anonymous_memory(size_bytes: int) -> tuple[int, mmap.mmap]:
    """A file without a name, and its memory: gone with the processes, however they end."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("blockswarm-weights")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size_bytes)
    return fd, mmap.mmap(fd, size_bytes)


def give_order(started: Started, order: dict[str, Any], memory_fd: int) -> None:
    """What `_wait_for_order` waits for. Raises OSError if the process is gone."""
    process, connection = started
    connection.send_bytes(msgpack.packb(order))
    reduction.send_handle(connection, memory_fd, process.pid)


def _wait_for_order(connection: Connection) -> None:
    """The process. It ends when the other end of the pipe is gone."""
    threading.Thread(target=_end_with_owner, daemon=True).start()
    from node.trainer.process import trainer_main

    try:
        order = msgpack.unpackb(connection.recv_bytes(), strict_map_key=False)
        fd = reduction.recv_handle(connection)
    except (EOFError, OSError):
        return  # nobody wants us
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    trainer_main(connection, order, memory)


def _end_with_owner() -> None:
    """Beside whatever goes on: an import of many seconds or a long step looks at no pipe."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    os._exit(1)
