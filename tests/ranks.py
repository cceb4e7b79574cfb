"""Ranks on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.processes import SECONDS, started

ROOT = Path(__file__).resolve().parent.parent


def launch(mode: str, ranks: int, folder: Path, worker: str = "guard_worker") -> list[dict[str, Any]]:
    """Run a module of the tests on `ranks` processes; a deadlock ends in the timeout.

    As torchrun does, which would be one more process that imports torch: the store is this process's, on a free port.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    words = ("-m", f"tests.{worker}", mode, str(folder))
    told = [folder / f"{rank}.stderr" for rank in range(ranks)]
    running = [
        started(words, {**env, "RANK": str(r), "LOCAL_RANK": str(r)}, ROOT, told[r], told[r]) for r in range(ranks)
    ]
    try:
        for process in running:
            process.join(SECONDS)
        codes = [process.exitcode for process in running]
    finally:
        for process in running:
            process.kill()
            process.join()
    said = "\n".join(file.read_text()[-4000:] for file in told)
    assert codes == [0] * ranks, (codes, said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
