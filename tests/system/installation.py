"""A real installation: `kvmeter up` as a process, its data in a folder of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

ROOT = Path(__file__).parents[2]
KVMETER = (sys.executable, "-m", "gateway.commands")

START_SECONDS = 90
STOP_SECONDS = 15  # what `up` promises


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def environment(**settings: str) -> dict[str, str]:
    """This process's environment without its KVMETER settings, plus `settings`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVMETER_", "ANTHROPIC_"))}
    kept |= {"KVMETER_MODELS_DIR": str(ROOT / "var/models"), "PYTHONPATH": str(ROOT)}
    return {**kept, **settings}


def _hear_hangups() -> None:
    """A suite that runs under nohup hands on its deafness; `up` would rightly respect it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Installation:
    """`with Installation(...) as it:` serves at `it.url`; leaving drains it and checks how."""

    def __init__(
        self,
        data_dir: Path,
        *,
        model: Path | None = None,
        flags: Sequence[str] = (),
        **settings: str,
    ) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output: list[str] = []
        self._flags = [*flags, *(("--model", str(model)) if model else ())]
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None

    def start(self, *, group: bool = True) -> None:
        """Start `kvmeter up`, in a process group of its own, and wait for its ready line."""
        heard = threading.Event()
        begin = len(self.output)
        self._process = subprocess.Popen(
            [*KVMETER, "up", "--port", str(self.port), *self._flags],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0 if group else None,
            preexec_fn=_hear_hangups,  # noqa: PLW1509 - one system call in the child
        )
        threading.Thread(target=self._read, args=[self._process, heard], daemon=True).start()
        assert heard.wait(START_SECONDS), "".join(self.output)
        assert f"kvmeter ready: {self.url}\n" in self.output[begin:], "".join(self.output)

    def stop(self, number: int = signal.SIGTERM, *, group: bool = False) -> int:
        """Send a signal to `up`, or to its whole group, and return its exit code."""
        assert self._process is not None
        os.killpg(self.pid, number) if group else os.kill(self.pid, number)
        code = self._process.wait(STOP_SECONDS)
        self._process = None
        return code

    def kill(self, name: str) -> int:
        """kill -9 one of `up`, `gateway`, `engine`; returns the pid that is no more."""
        pid = self.pid_of(name)
        os.kill(pid, signal.SIGKILL)
        if name == "up" and self._process is not None:
            self._process.wait()
            self._process = None
        return pid

    def wait_restarted(self, name: str, killed: int) -> None:
        """Wait until another process has taken the place of the killed one, and serves."""
        wait_until(lambda: self.pid_of(name) not in (0, killed), 30)
        self.wait_ready()

    def wait_ready(self, seconds: float = 30) -> None:
        """Wait until /readyz answers 200."""
        wait_until(self.is_ready, seconds)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def run(self, *arguments: str, check: bool = True) -> str:
        """One `kvmeter` command on this installation; its stdout."""
        done = subprocess.run(
            [*KVMETER, *arguments], env=self.environment, cwd=ROOT, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pid_of(self, name: str) -> int:
        """The pid in the file; 0 for the moment in which the file is being written."""
        return int((self.data_dir / f"run/{name}.pid").read_text() or 0)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def keys(self) -> dict[str, str]:
        keys: dict[str, str] = json.loads((self.data_dir / "first-keys.json").read_text())
        return keys

    @property
    def environment(self) -> dict[str, str]:
        return environment(DATA_DIR=str(self.data_dir), **self._settings)

    def client(self, key: str | None = None) -> httpx.Client:
        """An HTTP client with the first customer key."""
        headers = {"x-api-key": key or self.keys["api_key"], "anthropic-version": "2023-06-01"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def record(self, request_id: str, *, key: str | None = None) -> dict[str, Any]:
        """The request's record, as the owner of `key` sees it."""
        with self.client(key) as client:
            response = client.get(f"/v1/kvmeter/requests/{request_id}")
        assert response.status_code == httpx.codes.OK, response.text
        record: dict[str, Any] = response.json()
        return record

    def _read(self, process: subprocess.Popen[str], heard: threading.Event) -> None:
        """Keep what `process` says; `heard` is set by its ready line, or by its end."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.output.append(line)
                if line.startswith("kvmeter ready: "):
                    heard.set()
        heard.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            code = self.stop()
            assert error or code == 0, "".join(self.output)


def wait_until(condition: Any, seconds: float = 10) -> None:
    """Poll `condition` until it holds; processes have no clock that a test could move."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
