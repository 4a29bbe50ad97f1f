"""Several processes, one per host, that train one model: how they meet, how they agree, and how they notice that one is gone.

Every process runs the same command and the same steps; what only one may do (write metrics, say things) is done by the first. JAX ends a
process whose peers are gone, but with a stack trace and an abort, so two threads here speak before it does: one at the start, while not
all have come, and one that watches the others' signs of life.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from kda_jax import sharding
from kda_jax.errors import Interrupted, ProcessLost, UserError

SILENCE_SECONDS = 30.0
"""A process that gives no sign of life for so long counts as gone."""
_PERIOD_SECONDS = 3.0
_BEATS = "kda_jax/beats"
_STOPPED = "stopped: "


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a run meet. Where JAX finds that out by itself (Cloud TPU, Slurm, Open MPI, Kubernetes) all stays None."""

    coordinator: str | None = None
    """HOST:PORT on the host of process 0, free and reachable from all others."""
    num_processes: int | None = None
    process_id: int | None = None
    """0, 1, ... num_processes - 1, another one for each process."""
    start_timeout: int = 300
    """Seconds to wait for the others."""

    def __post_init__(self):
        given = [x is not None for x in (self.coordinator, self.num_processes, self.process_id)]
        if any(given) and not all(given):
            raise UserError("--coordinator, --num-processes and --process-id belong together: give all three, or none where JAX finds them")
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 65536):
                raise UserError(f"--coordinator must be HOST:PORT, the port in 1..65535, got {self.coordinator!r}")
        if self.num_processes is not None and self.num_processes < 1:
            raise UserError(f"--num-processes must be at least 1, got {self.num_processes}")
        if self.process_id is not None and not 0 <= self.process_id < self.num_processes:
            raise UserError(f"--process-id must be in 0..{self.num_processes - 1}, one less than --num-processes, got {self.process_id}")


def start(rendezvous: Rendezvous) -> None:
    """Meet the other processes; before anything asks JAX for its devices.

    Raises:
        UserError: JAX cannot tell who the processes are. If they do not all come in time, the process says so and ends with code 5.
    """
    timeout = rendezvous.start_timeout
    came = threading.Event()
    threading.Thread(target=_give_up, args=(came, rendezvous), daemon=True).start()
    try:
        jax.distributed.initialize(
            rendezvous.coordinator,
            rendezvous.num_processes,
            rendezvous.process_id,
            initialization_timeout=2 * timeout,
            heartbeat_timeout_seconds=int(1.5 * SILENCE_SECONDS),
            shutdown_timeout_seconds=60,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the processes could not be joined ({error}). Where JAX does not find them by itself, give each one --coordinator HOST:PORT "
            "--num-processes N --process-id I"
        ) from error
    finally:
        came.set()
    _Watch.begin()


def _give_up(came: threading.Event, rendezvous: Rendezvous) -> None:
    if came.wait(rendezvous.start_timeout):
        return
    who = "this process" if rendezvous.process_id is None else f"process {rendezvous.process_id}"
    wanted = "all processes" if rendezvous.num_processes is None else f"all {rendezvous.num_processes} processes"
    where = "" if rendezvous.coordinator is None else f" at {rendezvous.coordinator}"
    _end(
        f"{who} has waited {rendezvous.start_timeout} s{where}, and not {wanted} of the run have come. Start the same command on every "
        "host (each with its own --process-id, where that is given)"
    )


def finish() -> None:
    """Leave together; nothing happens in a run of one process."""
    if jax.distributed.is_initialized():
        _Watch.end()
        jax.distributed.shutdown()


def leave(error: BaseException) -> None:
    """Leave because of `error`: with the others where all were asked to stop, else after telling them, for they would wait."""
    if not jax.distributed.is_initialized():
        return
    if isinstance(error, Interrupted):  # raised in every process after the same step
        return finish()
    _Watch.end(f"{_STOPPED}{error}")
    if is_first():
        time.sleep(2 * _PERIOD_SECONDS)  # its words are in a store that goes with this process, and whoever misses the store aborts


def is_joined() -> bool:
    """Whether this process is one of several, or has begun to be."""
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this is the process that writes and speaks for all."""
    return jax.process_index() == 0


def together(name: str) -> None:
    """Wait here for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_true(value: bool) -> bool:
    """Whether it is true in every process."""
    return value if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.array(value))))


def from_first(value: int) -> int:
    """The number, below 2**32, that the first process has."""
    return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.array(value, np.uint32)))


class Vote:
    """Any process may ask all of them to stop, and all stop after the same step, so that none waits for one that has stopped before.

    The requests travel with a step and are looked at in the next one, so that the device never waits for them.
    """

    def __init__(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
        self._before: Any = None
        self._any = jax.jit(lambda asked: asked.any(), out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))

    def cast(self, asked: bool) -> bool:
        """Whether to stop after this step, in which this process has been `asked` to or not. Every process calls it once a step."""
        if jax.process_count() == 1:
            return asked
        before = self._before
        votes = jax.make_array_from_callback((jax.device_count(),), self._sharding, lambda _: np.array([asked]))
        with sharding.no_mesh():
            self._before = self._any(votes)
        return before is not None and bool(before)


def check_same(what: str, value: int) -> None:
    """Refuse to go on where processes have been given different things. Raises UserError in all of them."""
    if not all_true(from_first(value) == value):
        raise UserError(f"the {jax.process_count()} processes of the run do not have the same {what}")


def check_shared(directory: Path) -> None:
    """Refuse a run directory that is not the same for all processes: each would write its part of the checkpoints to another disk.

    Raises:
        UserError: in every process, if one of them does not see a file that the first has written.
    """
    if jax.process_count() == 1:
        return
    token = from_first(time.time_ns() % 2**31)
    probe = directory / f".shared-{token}"
    if is_first():
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
    together("probe written")
    seen = all_true(probe.exists())
    together("probe read")
    if is_first():
        probe.unlink()
    if not seen:
        raise UserError(
            f"{directory} is not the same directory in all {jax.process_count()} processes: checkpoints need one that all hosts share"
        )


@contextmanager
def explained() -> Iterator[None]:
    """Turn the failure of a computation that several processes share into the sentence that explains it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        first = str(error).strip().splitlines()[0]
        raise ProcessLost(f"a computation over {jax.process_count()} processes failed, most likely because one is gone: {first}") from error


def _end(sentence: str) -> None:
    """End the process from whichever thread: the main one may wait for a peer for ever."""
    print(f"kda-jax: {sentence}", file=sys.stderr, flush=True)
    os._exit(ProcessLost.exit_code)


class _Watch(threading.Thread):
    """Signs of life through the key-value store that the processes of a JAX run share: a number that grows every few seconds."""

    current: "_Watch | None" = None

    def __init__(self, client: Any, gone: Callable[[str], None] = _end, silence: float = SILENCE_SECONDS, period: float = _PERIOD_SECONDS):
        super().__init__(daemon=True)
        self._client, self._gone, self._silence, self._period = client, gone, silence, period
        self._index, self._count = jax.process_index(), jax.process_count()
        self._over = threading.Event()

    @classmethod
    def begin(cls) -> None:
        from jax._src import distributed  # the store has no public name; without it JAX's own heartbeat is what there is

        client = getattr(getattr(distributed, "global_state", None), "client", None)
        if client is not None and jax.process_count() > 1:
            cls.current = cls(client)
            cls.current.start()

    @classmethod
    def end(cls, last_words: str | None = None) -> None:
        watch, cls.current = cls.current, None
        if watch is not None:
            watch._over.set()
            if last_words is not None:
                watch._beat(last_words)

    def run(self) -> None:
        last: dict[str, tuple[str, float]] = {str(i): ("", time.monotonic()) for i in range(self._count)}
        number = 0
        while not self._over.wait(self._period):
            try:
                number += 1
                self._beat(str(number))
                beats = self._client.key_value_dir_get(_BEATS)
            except jax.errors.JaxRuntimeError:
                return  # the first process is gone, and JAX says so itself
            if (sentence := self._look(beats, last)) and not self._over.is_set():
                self._gone(sentence)
                return

    def _beat(self, value: str) -> None:
        self._client.key_value_set(f"{_BEATS}/{self._index}", value, allow_overwrite=True)

    def _look(self, beats: list[tuple[str, str]], last: dict[str, tuple[str, float]]) -> str | None:
        """What is wrong with the others, if anything."""
        now = time.monotonic()
        for key, value in beats:
            process = key.rpartition("/")[2]
            if value.startswith(_STOPPED) and process != str(self._index):
                return f"process {process} of {self._count} has {value}"
            if value != last[process][0]:
                last[process] = value, now
        silent = [process for process, (_, since) in last.items() if now - since > self._silence]
        if silent:
            return (
                f"no sign of life from process {', '.join(silent)} of {self._count} for {self._silence:.0f} s: it is gone, and the run "
                "ends. Start the same command on every host to go on from the last checkpoint"
            )
        return None
