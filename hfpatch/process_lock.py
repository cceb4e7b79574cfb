"""A lock for the threads of a process, which a forked process has anew."""

from __future__ import annotations

import os
import threading


class ProcessLock:
    """A reentrant lock; in a forked process a new one, because the thread that held it is not there.

    Attributes:
        now: The lock of this process.
    """

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Put a new lock, which nobody holds, in the place of the present one."""
        self.now = threading.RLock()
