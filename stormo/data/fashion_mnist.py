"""Finds, fetches, verifies and reads Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stormo.data.fetch import Fetch, Sources
from stormo.data.idx import IdxFile, Release, UnusableError, corrupt_error, find_flaws, load_file, locate
from stormo.errors import EXIT_USAGE, SettingError, StormoError, unknown_name
from stormo.system.cache import data_cache

if TYPE_CHECKING:
    import torch

FASHION_MNIST = Release(
    title="Fashion-MNIST",
    num_classes=10,
    splits={
        "train": (
            IdxFile(
                name="train-images-idx3-ubyte",
                sha256="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                shape=(60_000, 28, 28),
            ),
            IdxFile(
                name="train-labels-idx1-ubyte",
                sha256="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                shape=(60_000,),
            ),
        ),
        "validation": (
            IdxFile(
                name="t10k-images-idx3-ubyte",
                sha256="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                shape=(10_000, 28, 28),
            ),
            IdxFile(
                name="t10k-labels-idx1-ubyte",
                sha256="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                shape=(10_000,),
            ),
        ),
    },
)
PUBLIC_SOURCES = Sources(
    mirrors=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        # This one has no https; what it sends is trusted no further than its check sum.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    package="dataset-fashion-mnist",
    package_folder=Path("/usr/share/datasets/fashion-mnist"),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrays:
    """One split in memory: images [n, 28, 28] of uint8, labels [n] of int64, both contiguous."""

    images: torch.Tensor
    labels: torch.Tensor


class DataNotFoundError(StormoError):
    """No place has a usable copy of the data set; the text lists what was tried."""

    exit_code = EXIT_USAGE


def read(folder: Path, split: Literal["train", "validation"], *, release: Release = FASHION_MNIST) -> Arrays:
    """One split of the files in `folder`, which `find_or_fetch` gave."""
    import torch

    if split not in release.splits:
        raise unknown_name("split", split, release.splits)
    tensors: list[torch.Tensor] = []
    for file in release.splits[split]:
        path = locate(folder, file) or folder / file.name
        try:
            content = load_file(path, file)
        except UnusableError as error:
            raise corrupt_error(path, str(error)) from error
        # torch takes over the writable buffer without a copy; `reshape` of it stays a contiguous view.
        flat = torch.frombuffer(content, dtype=torch.uint8, offset=len(file.header))
        tensors.append(flat.reshape(file.shape))
    images, labels = tensors
    if int(labels.max()) >= release.num_classes:
        why = f"has a label {int(labels.max())} where 0 to {release.num_classes - 1} are possible"
        raise corrupt_error(path, why)
    return Arrays(images=images, labels=labels.to(torch.int64))


def find_or_fetch(
    folder: Path | None,
    *,
    cache: Path | None = None,
    offline: bool = False,
    release: Release = FASHION_MNIST,
    sources: Sources = PUBLIC_SOURCES,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """The folder of verified files; to be called by one process per node.

    A given `folder` is the only place looked at. `tell` gets a sentence when there is something to wait for.
    """
    if folder is not None:
        folder = folder.expanduser().absolute()
        marker_folder: Path | None = None
        with contextlib.suppress(SettingError):  # no home folder: then every start hashes the files again
            marker_folder = _cache_folder(cache)
        flaws = find_flaws(folder, release, marker_folder)
        if flaws:
            names = ", ".join(file.name for file in release.files)
            raise SettingError(
                f"the data folder is {folder}",
                "; ".join(flaws),
                f"put {names} of {release.title} there, each with or without .gz, "
                "or leave --task.data-folder out to have them fetched",
            )
        return folder

    home = _cache_folder(cache)
    tried: list[str] = []
    for place, candidate in (("cache", home), (f"Debian package {sources.package}", sources.package_folder)):
        flaws = find_flaws(candidate, release, home)
        if not flaws:
            return candidate
        tried.append(f"{place}, {candidate}: {'; '.join(flaws)}")
    if offline:
        tried.append("network: not asked, since offline was set")
    elif Fetch(home=home, release=release, sources=sources, tell=tell or (lambda _: None)).run(tried):
        return home
    raise DataNotFoundError(_not_found_text(release, sources, tried))


def _not_found_text(release: Release, sources: Sources, tried: Iterable[str]) -> str:
    lines = [f"{release.title} was asked for, but no usable copy was found; tried, in this order:"]
    lines += [f"  - {line}" for line in tried]
    lines.append("On a machine with a network, download these files:")
    lines += [f"    {sources.mirrors[0]}{file.name}.gz" for file in release.files if sources.mirrors]
    lines.append("Put them into a folder that every node can read, and give --task.data-folder FOLDER.")
    return "\n".join(lines)


def _cache_folder(cache: Path | None) -> Path:
    root = data_cache(os.environ) if cache is None else cache
    try:
        return root.expanduser().absolute() / "fashion-mnist"
    except RuntimeError as error:  # a container whose user id has no entry in /etc/passwd
        raise SettingError(
            f"the data cache is {root}", "this user has no home folder", "set STORMO_DATA to a folder for data"
        ) from error
