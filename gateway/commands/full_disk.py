"""A disk that is full or cannot be written: one sentence with the folder, wherever it is met."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import OperationalError

from billing.errors import DatabaseUnreachable
from gateway.errors import CommandError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
SQLITE_DISK_ERRORS = ("database or disk is full", "disk I/O error", "readonly database")


@contextmanager
def writing_in(data_dir: Path) -> Iterator[None]:
    """Raise CommandError for a disk error in the block, which is about the files in `data_dir`.

    A write to an open file, and SQLite, say that the disk is full but not which.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = error.filename or data_dir
        raise CommandError(f"Cannot write {where}: {os.strerror(error.errno)}") from error
    except (OperationalError, DatabaseUnreachable) as error:
        reason = next((reason for reason in SQLITE_DISK_ERRORS if reason in str(error)), None)
        if reason is None:
            raise
        raise CommandError(f"Cannot write in {data_dir}: {reason}") from error
