"""Whether a child process of `kvmeter up` still answers; one that is stopped or stuck does not.

Only silence counts: a connection that is refused or reset, or an engine that has no link yet, is a
process that does something, or one that has ended and is started again anyway.
"""

import asyncio

import httpx

from engine.client import EngineClient, EngineLost

PROBE_SECONDS = 5.0  # between two probes, and the longest that one waits
SILENT_PROBES = 12  # a minute: longer than any step, shorter than a client's patience


async def engine_answers(engine: EngineClient) -> bool:
    """Whether the engine answers a call on its link, or has none."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await engine.stats()
    except TimeoutError:
        return False
    except EngineLost:
        return True
    return True


async def gateway_answers(url: str) -> bool:
    """Whether the gateway at `url` answers a probe, or refuses the connection."""
    async with httpx.AsyncClient(trust_env=False, timeout=PROBE_SECONDS) as client:
        try:
            await client.get(f"{url}/healthz")
        except httpx.TimeoutException:
            return False
        except httpx.TransportError:
            return True
    return True
