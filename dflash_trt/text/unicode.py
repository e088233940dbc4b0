"""Text that is none: half a surrogate pair, which an argument or JSON may bring, has no UTF-8."""

from __future__ import annotations

from dflash_trt.errors import RequestError


def check_unicode(field: str, text: str) -> None:
    """Refuse text that is not valid Unicode. Raises `RequestError` that names the field."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start} of {field} is half a surrogate pair, not valid Unicode",
            hint="give it as UTF-8",
        ) from None
