"""Where stormo keeps what it has fetched, and what torch has compiled for it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from stormo.errors import SettingError
from stormo.system.files import BadFileError, private_folder


def keep_compiled(environ: MutableMapping[str, str]) -> None:
    """Have torch.compile keep its code in a folder of the user's own, unless the user has named one.

    Torch's default lies in /tmp under a name that anybody may take first, and what lies there is loaded as code.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in environ and "TRITON_CACHE_DIR" in environ:
        return
    home = Path(environ["XDG_CACHE_HOME"]) if environ.get("XDG_CACHE_HOME") else Path("~/.cache")
    try:
        folder = private_folder(home.expanduser() / "stormo-compiled")
    except OSError as error:
        why = error.problem if isinstance(error, BadFileError) else str(error.strerror)
        raise SettingError(
            f"{home}/stormo-compiled was to keep what torch.compile makes",
            why,
            "set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to folders of your own",
        ) from None
    environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def data_cache(environ: Mapping[str, str]) -> Path:
    """The folder, which may begin with ~: $STORMO_DATA, or stormo's in the user's cache."""
    if environ.get("STORMO_DATA"):
        return Path(environ["STORMO_DATA"])
    cache = environ.get("XDG_CACHE_HOME")
    return Path(cache) / "stormo" if cache else Path("~/.cache/stormo")
