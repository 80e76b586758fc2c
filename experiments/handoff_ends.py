"""The two ends of the `handoff` experiment, each its own process: python -m experiments.handoff_ends rld|md

Invariant: commands come as JSON lines on stdin and every one is answered by one JSON line on stdout; the
process ends with its stdin. Both ends hold the context's KV; RLD has made `tokens` more and knows the two ids
after them.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from typing import Any

import numpy as np

from pdd.config import EngineConfig, KvStreamConfig, ModelConfig, from_plain
from pdd.errors import TransferError
from pdd.lifecycle import now_s
from pdd.model.engine import Engine
from pdd.model.kv import KvSegment
from pdd.model.load import load
from pdd.net.control import ControlSocket
from pdd.net.messages import Eager, Message
from pdd.net.stream import KvPool, KvServer, Received, Segment

_ID = struct.Struct("!I")


class _End:
    """What both ends have: the model with the context's KV."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.secret = bytes.fromhex(setup["secret"])
        self.stream = from_plain(KvStreamConfig, setup["kv_stream"])
        self.engine = Engine(
            load(from_plain(ModelConfig, setup["model"])), from_plain(EngineConfig, setup["engine"])
        )
        draw = np.random.default_rng(setup["seed"])
        self.context = draw.integers(0, self.engine.loaded.vocab, setup["context_tokens"]).tolist()
        self.tokens: int = setup["tokens"]
        self.seq = self.engine.new()
        self.next_id = int(self.engine.extend(self.seq, self.context).argmax())
        self.control = ControlSocket(setup["end"], self.secret, setup["host"], messages=Message)

    def step(self, token: int) -> int:
        """Decode one token, greedily."""
        return int(self.engine.decode([self.seq], [token])[0].argmax())


class RelayEnd(_End):
    """Has made `tokens` tokens after the context; hands them over as KV or as ids."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.output = [self.next_id]
        for _ in range(self.tokens):
            self.output.append(self.step(self.output[-1]))
        snapshot = self.engine.snapshot(self.seq)
        self.after = self.step(self.output[-1])
        self.engine.restore(self.seq, snapshot)

    async def connect(self, control: str, kv: str) -> dict[str, Any]:
        """Open and warm the ways to MD."""
        self.control.connect("md", control)
        self.pool = KvPool("rld", "md", kv, self.secret, self.stream, "wan")
        await self.pool.start()
        return {"distinct_ids": len(set(self.output))}

    async def ids(self, number: int) -> dict[str, Any]:
        """Send the ids in one message."""
        start_s = now_s()
        sent = await self.control.send("md", Eager(f"ids-{number}", 0, tuple(self.output[: self.tokens])))
        return {"start_s": start_s, "sent_bytes": sent, "next_id": self.output[-1], "after_id": self.after}

    async def kv(self, number: int) -> dict[str, Any]:
        """Copy the tokens' KV out of the cache and send it, with the id to go on from."""
        start_s = now_s()
        segment = self.engine.export(self.seq, len(self.context), len(self.context) + self.tokens)
        header, payload = segment.to_bytes()
        export_ms = 1e3 * (now_s() - start_s)
        meta = _ID.pack(self.output[-1]) + header
        done = await self.pool.send(Segment(f"kv-{number}", segment.start, segment.end, True, meta, payload))
        if not done.ok:
            raise TransferError(f"handoff {number}: {done.error}")
        return {
            "start_s": start_s,
            "export_ms": export_ms,
            "sent_bytes": done.bytes + len(meta),
            "after_id": self.after,
        }


class MainEnd(_End):
    """Takes the tokens over, and says when it could step."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.snapshot = self.engine.snapshot(self.seq)
        self.arrived: asyncio.Queue[Received] = asyncio.Queue()
        self.server = KvServer("md", self.secret, setup["host"], self.stream, self.arrived.put_nowait)

    async def listen(self) -> dict[str, Any]:
        """Where RLD finds this end."""
        await self.server.start()
        return {"control": self.control.address, "kv": self.server.address}

    async def ids(self, number: int) -> dict[str, Any]:
        """Wait for the ids, extend over them (this recomputes their KV), then decode one step."""
        self.engine.restore(self.seq, self.snapshot)
        _, message = await self.control.recv()
        arrived_s = now_s()
        next_id = int(self.engine.extend(self.seq, list(message.ids)).argmax())
        return self._ready(arrived_s, now_s(), next_id)

    async def kv(self, number: int) -> dict[str, Any]:
        """Wait for the KV, load it into the cache, then decode one step."""
        self.engine.restore(self.seq, self.snapshot)
        received = await self.arrived.get()
        arrived_s = now_s()
        self.engine.load(self.seq, KvSegment.from_bytes(received.meta[_ID.size :], received.payload))
        return self._ready(arrived_s, now_s(), _ID.unpack_from(received.meta)[0])

    def _ready(self, arrived_s: float, ready_s: float, next_id: int) -> dict[str, Any]:
        after_id = self.step(next_id)
        stepped_ms = 1e3 * (now_s() - ready_s)
        times = {"arrived_s": arrived_s, "ready_s": ready_s, "step_ms": stepped_ms}
        return {**times, "next_id": next_id, "after_id": after_id}


async def _serve(end: str) -> None:
    lines = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    setup = json.loads(await lines.readline())
    here = RelayEnd(setup) if end == "rld" else MainEnd(setup)
    print(json.dumps({"up": end}), flush=True)
    while line := await lines.readline():
        command = json.loads(line)
        answer = await getattr(here, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
