"""Runs an `async def` test in its own event loop, bounded in time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT_S = 30.0


def aio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Decorator: the test fails after `LIMIT_S`, and when it leaves a task behind."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(_bounded(test, *args, **kwargs))

    return run


async def _bounded(test: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        await test(*args, **kwargs)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"
