"""Headers as msgpack, and back. The only place that knows msgpack; bytes that are no valid header raise WireError."""

from __future__ import annotations

from typing import Any

import msgpack

from rollout.errors import WireError
from rollout.wire_fields import Buffer

MAX_HEADER = 64 << 20  # bytes of one header


def pack(value: Any) -> bytes:
    """A header. Raises WireError for a value that has no msgpack form."""
    try:
        return msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError("header", f"cannot be encoded: {error}") from error


def unpack(data: Buffer, field: str = "header") -> Any:
    """The value of a header, from bytes that may be anything at all."""
    if len(data) > MAX_HEADER:
        raise WireError(field, f"{len(data)} bytes, over the limit of {MAX_HEADER}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extensions)
    except (ValueError, msgpack.exceptions.UnpackException, OverflowError) as error:
        raise WireError(field, f"not msgpack: {error or type(error).__name__}") from error


def _no_extensions(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
