"""The file format of a lease on disk: written atomically, checked when it is read.

    magic | header length u32 | CRC-32 of header and tokens u32 | header, JSON | tokens | payload

The name is `KEY-EXPIRES-REMAINING.lease`: the prefix's key in hex, the wall-clock time at which the
lease expires, and the time that it had left when it was named, both in milliseconds. So extending a
lease is one rename, and setting the wall clock back never gives it more than it had left.

A payload reveals the customer's text: files have mode 0600, their folder 0700.
"""

import hashlib
import json
import os
import re
import struct
import zlib
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from io import BufferedReader, FileIO
from pathlib import Path

import numpy as np

from engine.blocks.prefix_index import TOKEN_BYTES
from engine.errors import LeaseFileCorrupt, LeaseFileForeign
from engine.lease_types import StoredPrefix

_MAGIC = b"kvmeter lease 1\n"
_LENGTHS = struct.Struct("<II")
_MAX_HEADER_BYTES = 64 << 10
_NAME = re.compile(r"([0-9a-f]{64})-(\d{1,15})-(\d{1,15})\.lease")


@dataclass(frozen=True, slots=True)
class Origin:
    """What KV was computed with; an engine reads only files with its own origin."""

    weights_digest: str
    dtype: str
    layout: str


@dataclass(frozen=True, slots=True)
class LeaseFile:
    """The header of a complete file. `expires_at_ms` is wall-clock time."""

    path: Path
    stored: StoredPrefix
    expires_at_ms: int
    remaining_ms: int
    payload_bytes: int
    payload_sha256: str


def file_name(key: bytes, *, expires_at_ms: int, remaining_ms: int) -> str:
    """Return the name of a lease's file."""
    return f"{key.hex()}-{expires_at_ms}-{remaining_ms}.lease"


def write_lease(temporary: Path, stored: StoredPrefix, origin: Origin, payload: np.ndarray) -> str:
    """Write and sync a file under a temporary name, and return the payload's SHA-256.

    The caller renames it. Raises OSError, and then removes the file.
    """
    sha256 = hashlib.sha256(payload.data).hexdigest()
    header = json.dumps(
        {
            "lease_id": stored.lease_id,
            "request_id": stored.request_id,
            "owner": stored.owner.hex(),
            "parent_key": stored.parent_key.hex(),
            "num_tokens": stored.num_tokens,
            "payload_bytes": payload.nbytes,
            "payload_sha256": sha256,
            **asdict(origin),
        }
    ).encode()
    lengths = _LENGTHS.pack(len(header), zlib.crc32(stored.token_ids, zlib.crc32(header)))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for part in (_MAGIC, lengths, header, stored.token_ids, payload.data):
            _write_all(fd, memoryview(part))
        os.fsync(fd)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return sha256


def read_manifest(path: Path, origin: Origin) -> LeaseFile:
    """Return everything but the payload.

    Raises LeaseFileCorrupt for a damaged file, LeaseFileForeign for a file of another model, number
    format, layout or version, and OSError.
    """
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise LeaseFileForeign(path)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise LeaseFileForeign(path)
        try:
            found, made_by = _read_header(file, named)
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise LeaseFileCorrupt(path) from error
    if made_by != asdict(origin):
        raise LeaseFileForeign(path)
    return found


def read_payload(file: FileIO, num_bytes: int, sha256: str) -> np.ndarray | None:
    """Return the payload at the end of an open file, None if it is damaged. Raises OSError."""
    payload = np.empty(num_bytes, dtype=np.uint8)
    if os.fstat(file.fileno()).st_size < num_bytes:
        return None
    file.seek(-num_bytes, os.SEEK_END)
    view, done = payload.data, 0
    while done < num_bytes and (count := file.readinto(view[done:])):
        done += count
    is_whole = done == num_bytes and hashlib.sha256(payload.data).hexdigest() == sha256
    return payload if is_whole else None


def _read_header(file: BufferedReader, named: re.Match[str]) -> tuple[LeaseFile, dict[str, str]]:
    """Return an open file's header and origin; a damaged one raises one of a parser's errors."""
    num_header_bytes, check = _LENGTHS.unpack(file.read(_LENGTHS.size))
    header = file.read(min(num_header_bytes, _MAX_HEADER_BYTES))
    fields = json.loads(header)
    num_token_bytes = TOKEN_BYTES * fields["num_tokens"]
    num_bytes = file.tell() + num_token_bytes + fields["payload_bytes"]
    if num_bytes != os.fstat(file.fileno()).st_size:
        raise ValueError("The file is cut short")
    token_ids = file.read(num_token_bytes)
    if zlib.crc32(token_ids, zlib.crc32(header)) != check:
        raise ValueError("The check does not fit")
    key, expires_at_ms, remaining_ms = named.groups()
    stored = StoredPrefix(
        lease_id=fields["lease_id"],
        request_id=fields["request_id"],
        owner=bytes.fromhex(fields["owner"]),
        key=bytes.fromhex(key),
        parent_key=bytes.fromhex(fields["parent_key"]),
        token_ids=token_ids,
    )
    found = LeaseFile(
        path=Path(file.name),
        stored=stored,
        expires_at_ms=int(expires_at_ms),
        remaining_ms=int(remaining_ms),
        payload_bytes=fields["payload_bytes"],
        payload_sha256=fields["payload_sha256"],
    )
    return found, {field.name: fields[field.name] for field in dataclass_fields(Origin)}


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
