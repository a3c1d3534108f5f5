"""The SDK versions the tests drive, each as a subprocess that keeps running."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
NEW, OLD = "2.10.0", "0.125.0"
VERSIONS = (NEW, OLD)


class SdkError(Exception):
    """What the SDK raised: its class, HTTP status, error type, message and request id."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['class']}: {error['message']}")
        self.class_name: str = error["class"]
        self.status: int | None = error.get("status")
        self.type: str | None = error.get("type")
        self.message: str = error["message"]
        self.request_id: str | None = error.get("request_id")


class Sdk:
    """One SDK version; every call opens a client of its own, without retries unless asked."""

    def __init__(self, version: str) -> None:
        self.version = version
        path = [] if version == NEW else [str(ROOT / ".venv/sdk" / version)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ANTHROPIC_")}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py"))],
            env={**clean, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(
        self, call: str, *, base_url: str, api_key: str, max_retries: int = 0, **arguments: Any
    ) -> dict[str, Any]:
        client = {"base_url": base_url, "api_key": api_key, "max_retries": max_retries}
        job = {"call": call, "client": client, "arguments": arguments}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise SdkError(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
