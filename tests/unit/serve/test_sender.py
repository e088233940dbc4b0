"""How a request of Triton is answered: what Triton frees is not asked about."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from dflash_trt.serve.triton import SenderClient

FINAL = 1
PB = SimpleNamespace(
    InferenceResponse=lambda **_: None, Tensor=None, TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL
)


class Sender:
    """Triton's, which has nothing left to ask about while and after it sends the last response."""

    def __init__(self) -> None:
        self.is_freed = False
        self.faults = 0

    def send(self, response: Any, flags: int) -> None:
        self.is_freed |= flags == FINAL
        time.sleep(0.001)

    def is_cancelled(self) -> bool:
        self.faults += self.is_freed
        time.sleep(0.001)
        self.faults += self.is_freed
        return False


def test_nobody_asks_at_the_end_or_after_it() -> None:
    for _ in range(30):
        sender = Sender()
        client = SenderClient(PB, sender)
        done = threading.Event()

        def ask(client: SenderClient = client, done: threading.Event = done) -> None:
            while not done.is_set():
                assert not client.is_gone()

        asking = threading.Thread(target=ask)
        asking.start()
        client.send({}, None, is_last=False)
        client.send({}, None, is_last=True)
        time.sleep(0.002)
        done.set()
        asking.join()
        assert sender.faults == 0
