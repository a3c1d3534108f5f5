"""Engine addresses, `unix:PATH` or `tcp://HOST:PORT`: parsing, listening, socket options."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engine.errors import AddressError

BACKLOG = 64
# The kernel's limit for a socket path is 107 bytes; a longer one is opened through /proc/self/fd.
MAX_DIRECT_PATH_BYTES = 100


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket's path."""

    path: Path


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP host and port."""

    host: str
    port: int


def parse_address(url: str) -> UnixAddress | TcpAddress:
    """Parse an engine URL. Raises AddressError."""
    if url.startswith("unix:") and (path := url.removeprefix("unix:").removeprefix("//")):
        return UnixAddress(Path(path).absolute())
    with contextlib.suppress(ValueError):  # a bad port
        parts = urlsplit(url)
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path:
            return TcpAddress(parts.hostname, parts.port)
    raise AddressError(f"Not an engine address (unix:PATH or tcp://HOST:PORT): {url}")


def listen(url: str) -> socket.socket:
    """Return a non-blocking listener; a Unix socket has mode 0600, a new folder for it 0700.

    A socket file without a listening process is replaced. Raises AddressError.
    """
    address = parse_address(url)
    try:
        if isinstance(address, TcpAddress):
            listener = _listen_tcp(address)
        else:
            listener = _listen_unix(address.path)
    except OSError as error:
        # A failed name resolution has a negative errno and its own text.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise AddressError(f"Cannot listen on {url}: {reason}.") from error
    listener.setblocking(False)
    return listener


def bound_url(listener: socket.socket, url: str) -> str:
    """Return the URL of this listener: `url`, with the port that the system chose for port 0."""
    if listener.family == socket.AF_UNIX:
        return url
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a name of a socket that is within the kernel's path limit.

    A long path goes through an open descriptor of its folder, so the name is valid only inside the
    `with` block.
    """
    if len(os.fsencode(path)) <= MAX_DIRECT_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def tune(connection: socket.socket) -> None:
    """On TCP, send small frames at once and detect a dead peer host within half a minute."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _listen_tcp(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)


def _listen_unix(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as name:
            _remove_stale(path, name)
            listener.bind(name)
        path.chmod(0o600)  # before listen(): no client can connect until then
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path, name: str) -> None:
    """Remove a socket file that no process listens on."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise AddressError(f"Cannot listen on unix:{path}: a file that is no socket is in the way.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)  # a full backlog is an engine too
        if probe.connect_ex(name) != errno.ECONNREFUSED:
            raise AddressError(f"Cannot listen on unix:{path}: another engine serves it.")
    path.unlink()
