"""What tests of the planes that load in place (nccl, ipc) have instead of vLLM: a list of the calls it got."""

from __future__ import annotations

from typing import Any


class FakeLlm:
    """Records vLLM's calls; `received` is what its workers say that they loaded."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.received: dict[str, str] = {}
        self.errored = False
        self.output_processor = self.engine_core = self
        self.request_states: dict[str, None] = {"r1": None}

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.log.append(args[0] if args else method)
        return [self.answer(*args)] if args else [None]

    def answer(self, what: str, args: dict[str, Any]) -> dict[str, Any]:
        """What a worker says to a weight call."""
        return self.received

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.log.append(name)

        return call
