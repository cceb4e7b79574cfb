"""A process that measures parts of files: `python -m hfpatch.scanning.worker` reads lots and prints values, one a line.

multiprocessing is not used: its children run the caller's script again, which fails without
`if __name__ == "__main__"`. A worker ends when its stdin is closed, however the caller ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from queue import SimpleQueue

from hfpatch.scanning.values import Piece, Values, measure

Lot = tuple[Path, Sequence[Piece]]
"""A file, and consecutive pieces of it."""


@contextmanager
def measured(lots: Iterable[Lot], processes: int) -> Generator[Iterable[list[Values] | str]]:
    """Measure lots in several processes; yields the values of each lot in order, or why it could not be read.

    Leaving the context ends the processes at once.
    """
    workers = [_Worker() for _ in range(processes)]
    free: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def ask(lot: Lot) -> list[Values] | str:
        worker = free.get()
        try:
            return worker.ask(*lot)
        finally:
            free.put(worker)

    threads = ThreadPoolExecutor(processes)
    try:
        yield threads.map(ask, lots)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()
        threads.shutdown()


class _Worker:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def ask(self, file: Path, pieces: Sequence[Piece]) -> list[Values] | str:
        if self._ended:
            return "not read"
        process = self._process = self._process or _start()
        assert process.stdin is not None  # noqa: S101 - pipes were asked for
        assert process.stdout is not None  # noqa: S101
        try:
            process.stdin.write(json.dumps([str(file), *map(astuple, pieces)]).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._process = None
            return f"the process that read the file ended ({_cause(process.wait())})"
        answer = json.loads(line)
        return answer if isinstance(answer, str) else [Values(*values) for values in answer]

    def end(self) -> None:
        self._ended = True
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join([root, *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hfpatch.scanning.worker"],  # -P: no module of the current directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C reaches the caller only, which ends them
    )


def _cause(code: int) -> str:
    if code == -signal.SIGBUS:
        return "the file was truncated while it was read, or the disk fails"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _main() -> None:
    for line in sys.stdin.buffer:
        file, *pieces = json.loads(line)
        try:
            answer = [astuple(v) for v in measure(Path(file), [Piece(*p) for p in pieces])]
        except OSError as error:
            answer = error.strerror or str(error)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()
